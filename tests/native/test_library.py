"""The declarations that the library carries, and what native/_layer.py knows of MXNet's."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from gluon_syncbn.native import Connection, _layer
from gluon_syncbn.native.library import _ctype, library

OPERATOR = Path(__file__).resolve().parents[2] / "src/operator"
CODE = "".join(path.read_text() for path in sorted(OPERATOR.glob("api/*.cc")))
NAMES = re.findall(r"^SBN_(?:API|CALLBACK)\([^,]*?,\s*(\w+)", CODE, re.M)


def test_every_declaration_is_understood():
    assert len(NAMES) == CODE.count("SBN_API(") + CODE.count("SBN_CALLBACK(") > 40
    for name in NAMES:
        _, parameters = library.declared(name)
        assert all(map(str.isidentifier, parameters)), name


def test_types():
    function = library.gluon_syncbn_packed_size
    assert function.restype is ctypes.c_int64
    assert function.argtypes == (ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    assert function(4, processes=2, exact_bits=53) == function(4, 2, 53) > 0
    with pytest.raises(TypeError, match="exact_bits"):
        function(4, 2)
    assert _ctype("const char*") is ctypes.c_char_p and _ctype("void* const*") is ctypes.c_void_p
    assert _ctype("void") is None


@pytest.mark.parametrize("unknown", ["float", "bool", "int64_t&", "const char", "size_t"])
def test_unknown_types(unknown):
    with pytest.raises(KeyError, match=unknown):
        _ctype(unknown)


def test_a_function_that_is_missing():
    with pytest.raises(AttributeError, match=r"gluon_syncbn_none.*Build it again: pip install"):
        library.gluon_syncbn_none()


@pytest.mark.parametrize("text", ["a\nb", "1 2\x1e\x1f", "\U0001f600é", "b\udce9", " "])
def test_texts_of_exchanges_come_as_they_are(text):
    connection = Connection(all_reduce=lambda key, array: array)
    route = connection.function_route(text, 2, 0, 1, 0)
    for title in (text, "another"):
        route.exchange(title, 5.0, np.zeros(2))
    in_flight, completed = connection.in_flight()
    spelt = text.replace("\udce9", r"\udce9")
    assert [(each.title, each.key, each.number) for each in completed] == [
        (spelt, spelt, 1),
        ("another", spelt, 2),
    ]
    assert not in_flight and all(each.timeout == 5.0 for each in completed)


def test_functions_of_mxnet():
    [body] = re.findall(
        r"struct MXNetApi \{(.*?)\n\};", (OPERATOR / "mxnet/c_api.h").read_text(), re.S
    )
    of_c = [name.replace("_", "") for name in re.findall(r"^  \S.*?\(\*(\w+)\)", body, re.M)]
    assert len(of_c) == len(_layer._FUNCTIONS)
    for ours, of_mxnet in zip(of_c, _layer._FUNCTIONS):
        assert ours in of_mxnet.lower()
