"""For the processes that tests start. MXNet imports scikit-learn and scipy.stats where they are,
which is half of its start, and uses them for nothing here. In the MXNet of `make test-gpu`, its own
operators compute on simulated GPUs."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path


class _ForMXNet:
    @staticmethod
    def find_spec(name, path=None, target=None):
        mxnet = sys.modules.get("mxnet")
        if name in ("sklearn", "scipy.stats") and getattr(mxnet, "__spec__", None):
            if getattr(mxnet.__spec__, "_initializing", False):
                raise ModuleNotFoundError(f"{name} is left out of MXNet's import", name=name)
        return _with_simulated_gpus(name) if name == "mxnet" else None


def _with_simulated_gpus(name):
    spec = PathFinder.find_spec(name)
    if spec is None or not Path(spec.origin).with_name("libsimgpu_operators.so").exists():
        return None
    execute = spec.loader.exec_module

    def execute_and_load(module):
        execute(module)
        sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu" / "simgpu"))
        import devices  # noqa: F401
        import simulated_gpus  # noqa: F401

    spec.loader.exec_module = execute_and_load
    return spec


# After mxnet_compat's.
sys.meta_path.insert(sys.meta_path.index(PathFinder), _ForMXNet())
