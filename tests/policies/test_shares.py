"""Fixed shares of sources."""

import pytest
import torch

from inloop.errors import UsageError
from inloop.policies import Shares


def test_fixed_mixtures():
    assert Shares.uniform(4).probabilities().tolist() == [0.25] * 4
    assert Shares.proportional([10, 30]).probabilities().tolist() == [0.25, 0.75]
    tempered = Shares.tempered([1, 16], 2.0).probabilities()
    torch.testing.assert_close(tempered, torch.tensor([0.2, 0.8], dtype=torch.float64))
    assert Shares.tempered([1, 16], 1e9).probabilities().tolist() == pytest.approx([0.5, 0.5])
    assert Shares([1.0, 0.0]).sample(50).unique().tolist() == [0]


@pytest.mark.parametrize("shares", [[1.0], [], [-1.0, 2.0], [0.0, 0.0]])
def test_shares_that_are_none(shares):
    with pytest.raises(UsageError, match="at least 2 numbers"):
        Shares(shares)
