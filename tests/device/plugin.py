"""A pytest plugin that loads the pretend CUDA device before anything imports torch.

    python -m pytest -p tests.device.plugin tests/device          (make test-device)

Without the plugin nothing in this folder is collected: the device would change what other tests see of torch.
"""

from pathlib import Path

import pytest

from tests.device.pretend_cuda.building import CannotBuildError
from tests.device.pretend_cuda.loading import load

_why_not = ""
try:
    load()
except CannotBuildError as error:
    _why_not = f"no pretend CUDA device: {error}"


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder if there is no device."""
    here = Path(__file__).parent
    for item in items:
        if _why_not and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=_why_not))


def pytest_terminal_summary(terminalreporter):
    """Say once why they were skipped."""
    if _why_not:
        terminalreporter.write_line(_why_not)
