import pytest
import torch


@pytest.fixture
def double_precision():
    """Seed 0, and float64 as the default type of tensors."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
