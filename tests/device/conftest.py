import sys
from pathlib import Path

import pytest
import torch

_plugin = sys.modules.get("tests.device.plugin")
collect_ignore_glob = [] if _plugin is not None else ["*"]


def pytest_collection_modifyitems(items):
    """Skip the tests of this folder if there is no device."""
    if _plugin is not None and _plugin.why_there_is_none:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=_plugin.why_there_is_none))


@pytest.fixture
def tf32():
    """Matrix products and convolutions of float32 as many users have them: on tensor cores, which read ten bits of each mantissa."""
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
