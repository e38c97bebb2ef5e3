"""MXNet has few workspaces for all CPU contexts together, which a test with several of them has to raise first."""

import os

os.environ["MXNET_CPU_TEMP_COPY"] = "4096"
os.environ["MXNET_CPU_PARALLEL_RAND_COPY"] = "64"
# A test that would hang fails after this instead.
os.environ.setdefault("GLUON_SYNCBN_TIMEOUT", "60")
