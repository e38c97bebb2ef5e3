"""Adds the hook when Python starts, then runs the sitecustomize.py that this one hides."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))


def _add_hook() -> None:
    package = os.path.dirname(_folder)
    spec = importlib.util.spec_from_file_location(
        "mxnet_compat", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    module = sys.modules["mxnet_compat"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _run_hidden() -> None:
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_add_hook()
_run_hidden()
