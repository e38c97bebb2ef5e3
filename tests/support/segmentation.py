"""The modules of examples/segmentation."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "segmentation"


def load_example():
    """The example's modules. They are removed from sys.modules, as other examples may have modules
    of the same names."""
    names = [path.stem for path in EXAMPLE.glob("*.py")]
    sys.path.insert(0, str(EXAMPLE))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


example = load_example()
