"""The version numbers of ``distutils.version``, as MXNet and gluoncv compare them."""

import functools
import re


@functools.total_ordering
class LooseVersion:
    """Compares the numbers and words of a version one by one: 1.10 > 1.9, 1.9.post1 > 1.9."""

    def __init__(self, text):
        self.vstring = str(text)
        words = re.findall(r"\d+|[a-z]+", self.vstring)
        self.version = [int(word) if word.isdigit() else word for word in words]

    def __str__(self):
        return self.vstring

    def __repr__(self):
        return f"{type(self).__name__} ('{self}')"

    def _other(self, other):
        return other.version if isinstance(other, LooseVersion) else LooseVersion(other).version

    def __eq__(self, other):
        return self.version == self._other(other)

    def __lt__(self, other):
        return self.version < self._other(other)


class StrictVersion(LooseVersion):
    """The same for versions of only numbers: NumPy's is only compared as ``>= 1.6.0``."""
