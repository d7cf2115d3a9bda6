import sys

import pytest
import torch

collect_ignore_glob = [] if "tests.device.plugin" in sys.modules else ["*"]


@pytest.fixture
def tf32():
    """Matrix products of float32 as many users have them: on tensor cores, which read ten bits of each mantissa. Convolutions always are."""
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
