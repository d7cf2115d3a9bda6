"""Programs of the repository that are not part of the package, as modules."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_file(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
