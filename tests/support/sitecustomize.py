"""For the processes that tests start: MXNet imports scikit-learn and scipy.stats where they are,
which is half of its start, and uses them for nothing here."""

import sys


class _NotForMXNet:
    @staticmethod
    def find_spec(name, path=None, target=None):
        mxnet = sys.modules.get("mxnet")
        if name in ("sklearn", "scipy.stats") and getattr(mxnet, "__spec__", None):
            if getattr(mxnet.__spec__, "_initializing", False):
                raise ModuleNotFoundError(f"{name} is left out of MXNet's import", name=name)
        return None


sys.meta_path.insert(0, _NotForMXNet)
