"""MXNet has few workspaces for all CPU contexts together, which a test with several of them has to
raise first."""

import os

# More than the largest net here asks for in one pass over all devices. Each may grow to the largest
# workspace of all: 4096 of them took 11 GB in the test of FCN.
os.environ["MXNET_CPU_TEMP_COPY"] = "256"
os.environ["MXNET_CPU_PARALLEL_RAND_COPY"] = "64"
# A test that would hang fails after this instead.
os.environ.setdefault("GLUON_SYNCBN_TIMEOUT", "60")
