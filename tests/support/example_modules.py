"""The modules of the examples."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def load_example(name):
    """The modules of an example. They are removed from sys.modules, as both examples have modules
    of the same names."""
    names = [path.stem for path in (EXAMPLES / name).glob("*.py")]
    names = [each for each in names if each != "minimal"]  # Trains when it is imported.
    folders = [str(EXAMPLES / name), str(EXAMPLES)]
    sys.path[:0] = folders
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        for folder in folders:
            sys.path.remove(folder)
        for name in names:
            sys.modules.pop(name, None)
