"""The version numbers of ``distutils.version``, as MXNet and gluoncv compare them."""

from __future__ import annotations

import functools
import re
from typing import Any


@functools.total_ordering
class LooseVersion:
    """Compares the numbers and words of a version one by one: 1.10 > 1.9, 1.9.post1 > 1.9."""

    def __init__(self, text: Any) -> None:
        self.vstring = str(text)
        words = re.findall(r"\d+|[a-z]+", self.vstring)
        self.version: list[Any] = [int(word) if word.isdigit() else word for word in words]

    def __str__(self) -> str:
        return self.vstring

    def __repr__(self) -> str:
        return f"{type(self).__name__} ('{self}')"

    def _other(self, other: Any) -> list[Any]:
        return other.version if isinstance(other, LooseVersion) else LooseVersion(other).version

    def __eq__(self, other: Any) -> bool:
        return self.version == self._other(other)

    def __lt__(self, other: Any) -> bool:
        return self.version < self._other(other)


class StrictVersion(LooseVersion):
    """The same for versions of only numbers: NumPy's is only compared as ``>= 1.6.0``."""
