"""The code of recipes in the documentation, as it stands there."""

import re
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

DOCS = Path(__file__).resolve().parents[2] / "docs"


def recipe(page, words, **given):
    """Runs the one block of Python that has these words. given: the names it uses. Returns all."""
    text = (DOCS / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if words in block)
    names = {"sbn": sbn, "mx": mx, "np": np, "autograd": autograd, "gluon": gluon, **given}
    exec(compile(code, f"{page}: {words}", "exec"), names)
    return names
