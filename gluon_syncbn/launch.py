"""python -m gluon_syncbn.launch: the launcher of mxnet_launch."""

import sys

from mxnet_launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
