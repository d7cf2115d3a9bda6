"""Whatever people build is exact, without their doing anything."""

import pytest
import torch

from tests.alignment.architectures import ARCHITECTURES
from tests.alignment.exactness import assert_exact


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name, reduction):
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    assert_exact(model.double(), *inputs, reduction=reduction)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_recomputed(name):
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    inputs = [value.double() if value.is_floating_point() else value for value in inputs]
    assert_exact(model.double(), *inputs, retain="recompute")
