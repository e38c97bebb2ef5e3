"""What the examples share."""

import os


def configure_mxnet(cpu_contexts):
    """Set variables that MXNet reads when imported, unless they are set. Call this before that."""
    processes, cores = int(os.environ.get("GLUON_SYNCBN_SIZE", 1)), len(os.sched_getaffinity(0))
    if cpu_contexts > 1:
        # Also in processes of one context each: the initial parameters depend on it.
        os.environ.setdefault("MXNET_CPU_PARALLEL_RAND_COPY", "64")
    if processes > 1:
        cpu_contexts = 1
    if cpu_contexts > 1:
        # Contexts share MXNet's workspaces. A step that holds the last one while it waits for
        # another context would wait forever.
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", "4096")
    # Each context computes with threads of its own.
    threads = max(1, cores // (processes * min(2, cpu_contexts)))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The same numbers always give the same sums, so that resuming is exact.
    os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
    os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")
