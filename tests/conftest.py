import pytest
import torch
from hypothesis import settings

from inloop.alignment import sizes

settings.register_profile("inloop", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("inloop")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Treat small models as large ones: keep gradients of examples where they are smaller, and align each call by itself."""
    for name in ("SMALL_CALL", "SMALL_PRODUCT"):
        monkeypatch.setattr(sizes, name, 0)
    for name in ("PRODUCTS", "GROUP"):
        monkeypatch.setattr(sizes, name, {"cpu": 0, "other": 0})
