"""Every name that MXNet and gluoncv read of another package exists, or is put back."""

import ast
import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

# Without the tools, which nobody imports, and the parts of gluoncv that are for PyTorch.
LEFT_OUT = {("mxnet", "tools"), ("gluoncv", "torch"), ("gluoncv", "auto")}
# Only read on Windows, and of a StringIO that stands in for sys.stdout. gluoncv guards the import
# of pip, which is there to install packages.
NEVER_READ = {
    "ctypes.FormatError",
    "ctypes.GetLastError",
    "ctypes.cdll.kernel32",
    "ctypes.cdll.kernel32.GetACP",
    "ctypes.windll",
    "ctypes.windll.kernel32",
    "ctypes.windll.kernel32.MoveFileExW",
    "pip._internal.main.main",
    "sys.stdout.getvalue",
}


def sources(package):
    root = Path(importlib.util.find_spec(package).origin).parent
    for path in sorted(root.rglob("*.py")):
        if (package, path.relative_to(root).parts[0]) not in LEFT_OUT:
            yield path


def names(path):
    """The dotted names that a file reads of the modules which it imports, with their lines."""
    tree, imported = ast.parse(path.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
                name = alias.name if alias.asname else alias.name.split(".")[0]
                imported[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if alias.name != "*":
                    name = f"{node.module}.{alias.name}"
                    yield name, node.lineno
                    imported[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        attributes, base = [], node
        while isinstance(base, ast.Attribute):
            attributes.append(base.attr)
            base = base.value
        if attributes and isinstance(base, ast.Name) and base.id in imported:
            yield ".".join([imported[base.id], *reversed(attributes)]), node.lineno


def exists(name):
    """Whether an attribute or module can be read. True if its package is not installed."""
    module, *attributes = name.split(".")
    try:
        value = importlib.import_module(module)
    except ImportError:
        return True
    for attribute in attributes:
        module += "." + attribute
        if not hasattr(value, attribute):
            try:
                importlib.import_module(module)
            except ImportError:
                return False
        value = getattr(value, attribute)
    return True


@pytest.mark.parametrize("package", ["mxnet", "gluoncv"])
def test_all_names_exist(package):
    importlib.import_module(package)
    missing, known = [], {name: True for name in NEVER_READ}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sources(package):
            for name, line in names(path):
                if name.split(".")[0] in ("mxnet", "gluoncv"):
                    continue
                if name not in known:
                    known[name] = exists(name)
                if not known[name]:
                    missing.append(f"{path}:{line}: {name}")
    assert len(known) > 300
    assert not missing, "\n".join(missing)
