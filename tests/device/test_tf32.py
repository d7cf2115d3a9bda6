"""Matrix products and convolutions on tensor cores, which read ten bits of a float32's mantissa, in the step and when it is aligned."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy
from inloop.errors import VerificationError
from tests.device.problems import PROBLEMS
from tests.device.runs import Run, assert_same_rewards

NUM_SEEDS = 40


def networks(norm):
    """Two convolutions and a classifier, with other parameters each time."""
    for seed in range(NUM_SEEDS):
        torch.manual_seed(seed)
        convolutions = (nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), norm(32))
        head = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        yield nn.Sequential(*convolutions, *head).cuda()


def is_closed(model, batch_size):
    """Whether the first two steps of a learner, which are verified, raise an error."""
    learner = InLoop(model, MixturePolicy(3), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(batch_size, 3, 12, 12, device="cuda"), torch.randint(10, (batch_size,), device="cuda")
    try:
        for _ in range(2):
            learner.sample(batch_size)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            learner.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    except VerificationError:
        return True
    finally:
        learner.close()
    return False


@pytest.mark.parametrize(
    ("norm", "batch_size"),
    [
        (nn.BatchNorm2d, 2),
        (nn.BatchNorm2d, 4),
        (nn.BatchNorm2d, 8),
        (lambda channels: nn.GroupNorm(4, channels), 4),
    ],
    ids=["BatchNorm, 2", "BatchNorm, 4", "BatchNorm, 8", "GroupNorm, 4"],
)
def test_the_guard_lets_good_learners_pass(norm, batch_size, tf32):
    assert sum(is_closed(model, batch_size) for model in networks(norm)) == 0


def test_without_tf32_the_guard_lets_small_batches_pass():
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert sum(is_closed(model, 2) for model in networks(nn.BatchNorm2d)) == 0
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_the_guard_still_sees_what_is_missing(tf32):
    model = next(networks(nn.BatchNorm2d))
    learner = InLoop(model, MixturePolicy(3))
    learner.sample(8)
    loss = F.cross_entropy(model(torch.randn(8, 3, 12, 12, device="cuda")), torch.randint(10, (8,), device="cuda"))
    (loss + 0.1 * model[0].weight.square().sum()).backward()
    with pytest.raises(VerificationError, match=r"'0\.weight'"):
        learner.step(loss)


@pytest.mark.parametrize("problem", ["plain mlp", "gpt", "embedding"])
def test_rewards_change_by_rounding_only(problem, tf32):
    rounded = Run("cuda", PROBLEMS[problem], dtype=torch.float32).train(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = Run("cuda", PROBLEMS[problem], dtype=torch.float32).train(3)
    assert_same_rewards(rounded, exact, tolerance=0.05)
