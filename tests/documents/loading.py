"""Programs of the repository that are not part of the package, as modules."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_file(path):
    """The program as a module; it may import those beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
