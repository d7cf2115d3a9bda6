import pytest
import torch
from hypothesis import settings

settings.register_profile("inloop", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("inloop")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)
