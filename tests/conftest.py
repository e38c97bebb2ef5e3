"""MXNet has few workspaces for all CPU contexts together, which a test with several of them has to
raise first."""

import importlib.metadata
import os
import signal
import sys
from pathlib import Path

import mxnet_compat  # noqa: F401  Some tests import mxnet first.
import pytest

# The shell starts background jobs with SIGINT ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests' own modules, and what shortens the start, for the processes that tests start too.
_SUPPORT = str(Path(__file__).resolve().parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _SUPPORT]))

# With static_shape each graph keeps the one it drew when it was made. Two devices of one net that
# drew the same wait for each other forever, so there have to be far more than graphs in all tests.
os.environ["MXNET_CPU_TEMP_COPY"] = "65536"
os.environ["MXNET_CPU_PARALLEL_RAND_COPY"] = "64"
# A test that would hang fails after this instead.
os.environ.setdefault("GLUON_SYNCBN_TIMEOUT", "60")


if os.environ.get("GLUON_SYNCBN_TEST_DEVICES") == "gpu":
    sys.path[:0] = [_SUPPORT, str(Path(_SUPPORT).parent / "gpu" / "simgpu")]
    import devices  # noqa: F401
    import simulated_gpus

    assert simulated_gpus.EXIST, "this is not the MXNet of `make test-gpu`"

# Files that look at the same clusters (distributed/conftest.py).
_CLUSTERS = (
    "routes distributed distributed_empty distributed_groups distributed_join distributed_module "
    "distributed_recipes distributed_sums distributed_traps"
).split()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With pytest-xdist, the tests of a file run in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return "clusters" if Path(path).stem[len("test_") :] in _CLUSTERS else path

    return ByFile(config, log)


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu_only(reason): cannot run on simulated GPUs")


def pytest_collection_modifyitems(items):
    if os.environ.get("GLUON_SYNCBN_TEST_DEVICES") == "gpu":
        for item in items:
            for mark in item.iter_markers("cpu_only"):
                item.add_marker(pytest.mark.skip(reason=mark.args[0]))
            if "nn.BatchNormReLU" in item.name:
                item.add_marker(pytest.mark.skip(reason="MXNet has it on the CPU alone"))


@pytest.fixture(autouse=True)
def one_process(request, monkeypatch):
    """Other tests leave layers that exchange with processes, with which nothing recovers."""
    layer = sys.modules.get("gluon_syncbn.native._layer")
    if layer and "distributed" not in request.path.parts:
        monkeypatch.setattr(layer, "_spanning", {})


def pytest_report_header():
    try:
        return f"Horovod: {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        return "Horovod: not installed, so its tests are skipped (see build/horovod.log)"
