"""The shape of the sources: which module may import which, and how long a file is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gluon_syncbn", "mxnet_compat", "mxnet_launch")
OPERATOR = ROOT / "src" / "operator"
# Packages, programs, and what Python looks for.
FOUND_BY_NAME = ("__init__", "__main__", "launch", "sitecustomize")
ROOMS = (ROOT / "docs" / "design.md").read_text("utf-8").partition("\n## Rooms\n")[2]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}


def imports_of(name):
    """The modules of ours that a module imports."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join((above if node.level else []) + ([node.module] if node.module else []))
            found = [f"{base}.{alias.name}" for alias in node.names]
            found = [each if each in MODULES else base for each in found]
        else:
            continue
        yield from (each for each in found if each in MODULES)


@pytest.mark.parametrize("package", PACKAGES)
def test_private_modules_are_those_that_only_their_folder_imports(package):
    users = {name: set() for name in MODULES}
    for name in MODULES:
        for each in imports_of(name):
            users[each].add(name)
    for name, path in MODULES.items():
        if not name.startswith(package) or path.stem in FOUND_BY_NAME:
            continue
        others = [each for each in users[name] if MODULES[each].parent != path.parent]
        if path.stem.startswith("_"):
            assert not others, f"{name} is private, and imported by {others}"
        else:
            assert others, f"only its own folder imports {name}: begin its name with _"


def rooms(head):
    """The folders, and modules beside them, that the map lists under this one, from above."""
    (lines,) = re.findall(rf"^{head}\n((?:  .*\n)+)", ROOMS, re.MULTILINE)
    names = [re.match(r"  ((?:, )?\w+(?:/|\.py))+", line)[0] for line in lines.splitlines()]
    return re.findall(r"(\w+)[/.]", ",".join(names))


def test_folders_of_python_import_those_alone_that_the_map_lists_below_them():
    order = rooms("gluon_syncbn/")
    for name in MODULES:
        room = room_of(name)
        for each in imports_of(name):
            if room and room_of(each) not in (None, room):
                assert order.index(room) < order.index(room_of(each)), f"{name} imports {each}"


def room_of(name):
    """The folder of a module, or the module beside the folders. None for programs, for the package
    itself, whose names come from all folders, and for other packages."""
    parts = name.split(".")
    if parts[0] != "gluon_syncbn" or len(parts) == 1 or parts[1] in (*FOUND_BY_NAME, "_version"):
        return None
    return parts[1]


def test_folders_of_the_operator_include_those_alone_that_the_map_lists_below_them():
    order = rooms("src/operator/")
    for source in OPERATOR.glob("*/**/*.*"):
        place = order.index(source.relative_to(OPERATOR).parts[0])
        for name in re.findall(r'^#include "(\w+)/', source.read_text("utf-8"), re.MULTILINE):
            assert name in order[place:], f"{source.relative_to(ROOT)} includes {name}/"


def test_no_source_is_longer_than_400_lines():
    for folder in (*PACKAGES, "src", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".cc", ".h", ".cu", ".cuh", ".inc"):
                assert path.read_text("utf-8").count("\n") <= 400, path
