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
    # Each context computes with threads of its own.
    threads = max(1, cores // (processes * min(2, cpu_contexts)))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The same numbers always give the same sums, so that resuming is exact.
    os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
    os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")


def keep_apart(contexts):
    """Gives several CPU contexts enough of MXNet's workspaces, which they share, for the small net.
    Call this before MXNet's first operator.

    With too few, a context that waits for another holds one that this other needs. Each grows to
    the largest use of any operator, so more than needed cost memory. Two contexts need 30, eight
    some 200.
    """
    if contexts[0].device_type == "cpu" and len(contexts) > 1:
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", str(64 * len(contexts)))
