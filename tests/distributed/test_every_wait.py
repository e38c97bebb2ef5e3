"""No process waits for ever. Another one is gone, stopped, loops in Python, or is cut off: each
call that waits for it ends in time, with an error that names it."""

import contextlib
import os
import re
import time
import zlib

import pytest
from distributed_cluster import Cluster, TwoMachines, has_horovod, has_namespaces
from distributed_waits import CALLS, STARTS
from programs import STARTED_SECONDS, wait_until

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "distributed_waits.py")
TIMEOUT = 3.0
# What processes may need until they end, on a machine that has other things to do; and one that
# still starts when something happens to the other.
SLACK, START = 8.0, 20.0
FAULTS = ["is gone", "is stopped", "loops", "is cut off"]
# Without a store, only the function itself can be named.
STARTS_NAMED = {
    "create": "mx.kv.create('dist_sync') has waited {} s for the job's other processes",
    "KVStoreReducer": "has waited {} s for the other processes to make theirs",
    "hvd_init": "hvd.init() has waited {} s for the job's other processes",
    "HorovodReducer": "startup handshake",
}


def cases():
    """Each call with each fault. One fault of each, with one engine, is no `long` test."""
    for engine in CALLS:
        for call in [*STARTS[engine], *CALLS[engine]]:
            number = zlib.crc32(call.encode())
            engines = [each for each in CALLS if call in (*STARTS[each], *CALLS[each])]
            is_quick = engines[number % len(engines)] == engine
            faults = FAULTS[1:3] if call in STARTS[engine] else FAULTS
            quick = faults[number // 2 % min(3, len(faults))]
            for fault in faults:
                marks = [] if is_quick and fault == quick else [pytest.mark.long]
                yield pytest.param(engine, call, fault, marks=marks, id=f"{engine}-{call}-{fault}")


@pytest.mark.parametrize("engine, call, fault", [*cases()])
def test_every_wait_ends(engine, call, fault, tmp_path):
    if engine == "horovod" and not has_horovod():
        pytest.skip("Horovod is not installed: see build/horovod.log")
    if fault == "is cut off" and not has_namespaces():
        pytest.skip("This machine makes no network namespaces.")
    kind = TwoMachines if fault == "is cut off" else Cluster
    # So the launcher ends nothing.
    alone = kind is Cluster and engine == "kvstore"
    environment = {
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "GLUON_SYNCBN_SHARED_MEMORY": str(int(alone)),
    }
    options = {"engine": engine, "by_hand": alone, "script": SCRIPT, **environment}
    with contextlib.ExitStack() as held:
        # A busy machine may need longer than the first until something happens.
        for timeout in (TIMEOUT, 3 * TIMEOUT, 9 * TIMEOUT):
            folder = tmp_path / f"{timeout:g}"
            folder.mkdir()
            cluster = kind(folder, 2, [call, fault], GLUON_SYNCBN_TIMEOUT=str(timeout), **options)
            held.callback(cluster.clean)
            victim, struck = wait_for_fault(cluster)
            if victim:
                break
        assert victim, f"nothing happened to a process: {cluster.all_output()[-4000:]}"
        if fault == "is cut off":
            cluster.cut(None)
        left = [each for each in cluster.processes if not (alone and each.pid == victim)]
        with contextlib.suppress(AssertionError):
            wait_until(lambda: None not in [each.poll() for each in left], 27 + timeout)
        seconds, output = time.time() - struck, cluster.all_output()
        codes = [each.poll() for each in left]
        assert None not in codes and any(codes), output[-4000:]
        slack = START if call in STARTS[engine] else SLACK
        assert seconds < timeout + slack, output[-4000:]
        if call in STARTS[engine]:
            is_named = STARTS_NAMED[call].format(f"{timeout:g}") in output
        else:
            is_named = re.search(r"rank [01] \((?!waiting)", output)
        by_launcher = re.search(rf"launch: worker \d \(process {victim}\)", output)
        assert is_named or by_launcher, output[-4000:]


def wait_for_fault(cluster):
    """(number of the process, when it happened to it); zeros if all have ended before"""
    deadline = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < deadline:
        for path in cluster.folder.glob("struck-*"):
            return int(path.name.partition("-")[2]), path.stat().st_mtime
        if None not in [each.poll() for each in cluster.processes]:
            break
        time.sleep(0.02)
    return 0, 0.0
