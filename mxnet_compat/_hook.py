"""The import hook. It imports nothing but `sys` until a module needs a fix."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # As in `typing`.
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable

# As in _fixes.py.
_FIXED = ("mxnet", "onnx", "PIL.Image")
# Functions to call once mxnet has been imported.
after_mxnet: list[Callable[[], Any]] = []


def install() -> None:
    """Adds the hook to this process. Modules that are already loaded are fixed at once, as far as
    possible."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _FIXED:
        if sys.modules.get(name):
            _fixes(name)[1](sys.modules[name])


def _fixes(name: str) -> tuple[Callable[[], None], Callable[[Any], None]]:
    """What to call before and after the module is executed."""
    from . import _fixes

    return _fixes.FIXES[name]


class _Finder:
    """Leaves the search for a module to the other finders."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _FIXED or name in self._searching:
            return None
        from importlib.util import find_spec

        self._searching.add(name)
        try:
            spec: Any = find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Another loader, with a fix before and after it executes the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Later code reads a package's files through its loader.
        module.__loader__ = module.__spec__.loader = self._loader
        before, after = _fixes(module.__name__)
        before()
        self._loader.exec_module(module)
        after(module)
        for function in after_mxnet if module.__name__ == "mxnet" else ():
            function()
