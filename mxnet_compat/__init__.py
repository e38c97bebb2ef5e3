"""Lets MXNet 1.9.1 and gluoncv 0.10.5 run on today's Python and NumPy.

MXNet 1.9.1, the last release, uses names that NumPy 1.24 and later, Python 3.12 (``distutils``) and
onnx 1.17 (``onnx.mapping``) removed, so its import fails there. Import this package first::

    import mxnet_compat
    import mxnet as mx

``import gluon_syncbn`` and ``python -m gluon_syncbn.launch`` do it for you. For programs that do
neither, ``python -m gluon_syncbn doctor --enable-mxnet-on-import`` switches it on for a whole
environment, and ``--disable-mxnet-on-import`` off again.

The import only adds a finder to ``sys.meta_path``. When mxnet is imported, missing names are put
back with the meaning they had. If nothing is missing, as with Python 3.11 and NumPy 1.23, nothing
changes.
"""

from ._environment import inherit, is_needed, options
from ._hook import after_mxnet, install

__all__ = ["after_mxnet", "inherit", "is_needed", "options"]

install()
