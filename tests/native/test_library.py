"""What native/library.py and native/layer.py declare is what the C++ sources define."""

import ctypes
import re
from pathlib import Path

import pytest
from gluon_syncbn.native import layer
from gluon_syncbn.native import library as module

OPERATOR = Path(__file__).resolve().parents[2] / "src/operator"
FILES = "api/layers.cc api/routes.cc mxnet/c_api.h processes/outcome.h processes/transports.h"
CODE = "\n".join((OPERATOR / name).read_text() for name in FILES.split())
CODE = re.sub(r"//[^\n]*", "", CODE)
STRUCTS = {
    "gluon_syncbn_layer_config": module.LayerConfig,
    "Callbacks": module.Callbacks,
    "HorovodArrays": module.HorovodArrays,
    "HorovodSums": module.HorovodSums,
    "KVStoreSlots": module.KVStoreSlots,
    "KVStoreSums": module.KVStoreSums,
    "Outcome": module.Outcome,
    "StoreFunction": module.StoreFunction,
}
NUMBERS = {"int": "int", "int64_t": "int64_t", "double": "double", "void": "void"}
OURS = {ctypes.c_int: "int", ctypes.c_int64: "int64_t", ctypes.c_double: "double", None: "void"}


def kind(text):
    """Of a C declaration such as ``const char* key``: a number's type, "pointer" or "array"."""
    if "*" in text or re.match(r"(const )?(Handle|PropertyCreator)\b", text):
        return "pointer"
    return "array" if "[" in text else NUMBERS[text.split()[0]]


def our_kind(of):
    is_array = isinstance(of, type) and issubclass(of, ctypes.Array)
    return OURS.get(of, "array" if is_array else "pointer")


def split(text):
    """At the commas that are in no parentheses."""
    return re.split(r",\s*(?![^()]*\))", text) if text else []


def fields(struct):
    """[(name, kind)] of a struct in C."""
    [body] = re.findall(rf"struct {struct} \{{(.*?)\n\}};", CODE, re.S)
    body = re.sub(r"\n  std::string.*", "", body, flags=re.S)  # A function ends Outcome.
    found = []
    for line in map(str.strip, " ".join(body.split()).split(";")[:-1]):
        function = re.match(r".*?\(\*(\w+)\)", line)
        if function:
            found.append((function[1], "pointer"))
            continue
        first, *more = split(line)
        for text in [first, *(f"{first.split()[0]} {text}" for text in more)]:
            # Of `double *packed, *sums` and `const char *a, *b` each is a pointer.
            found.append((re.match(r".*?(\w+)(\[.*)?( = .*)?$", text)[1], kind(text)))
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs(name):
    of_c, ours = fields(name), STRUCTS[name]._fields_
    assert [field[1] for field in of_c] == [our_kind(of) for _, of in ours]
    assert [field[0].replace("timeout_seconds", "timeout") for field in of_c] == [
        n for n, _ in ours
    ]


def test_functions():
    pattern = r"SBN_EXPORT ([\w ]+?\*?) ?gluon_syncbn_(\w+)\((.*?)\) \{"
    of_c = re.findall(pattern, CODE, re.S)
    assert len(of_c) == CODE.count("SBN_EXPORT") > 40
    for result, name, parameters in of_c:
        function = getattr(module.library, f"gluon_syncbn_{name}")
        declared = [our_kind(function.restype), *map(our_kind, function.argtypes or ())]
        parameters = split(" ".join(parameters.split()))
        assert declared == [kind(result), *map(kind, parameters)], name


def test_functions_of_mxnet():
    of_c = [name.replace("_", "") for name, _ in fields("MXNetApi")]
    assert len(of_c) == len(layer._FUNCTIONS)
    for ours, of_mxnet in zip(of_c, layer._FUNCTIONS):
        assert ours in of_mxnet.lower()
