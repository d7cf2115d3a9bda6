"""CUDA graphs: what is captured runs once in Python and later without it, so hooks see nothing of the later steps.

A learner must refuse to be captured, with the fix. A model that torch.compile turns into graphs is recorded uncompiled.
"""

import pytest
import torch

from inloop import InLoop, MixturePolicy
from inloop.errors import UsageError
from tests.device.pretend_cuda.watching import graph_capture
from tests.device.problems import PROBLEMS
from tests.device.runs import Run


def captured_choice(run):
    with graph_capture():
        run.learner.sample(12)


def captured_passes(run):
    """As a captured training step: the learner's calls are outside of it."""
    batch = run.draw()
    with graph_capture():
        run.backward(*batch)
    run.learn()


def captured_learning(run):
    run.backward(*run.draw())
    with graph_capture():
        run.learn()


@pytest.mark.parametrize(
    "captured",
    [
        captured_choice,
        captured_passes,
        captured_learning,
    ],
    ids=["sample", "passes", "step"],
)
def test_a_capture_is_refused_with_the_fix(captured):
    run = Run("cuda", on_device=True).train(3)
    with pytest.raises(UsageError, match=r"(?s)captur.*Fix:"):
        captured(run)


def compiled_rewards(mode):
    """The mean rewards of a few steps of a compiled model, or of the plain one."""
    problem = PROBLEMS["plain mlp"]
    model = problem.model().cuda()
    trained = model if mode is None else torch.compile(model, mode=mode)
    learner = InLoop(trained, MixturePolicy(3), generator=torch.Generator().manual_seed(0))
    rewards = []
    for x, y in problem.sources():
        learner.sample(len(y))
        loss = problem.loss(trained(x.cuda()), y.cuda())
        loss.backward()
        rewards.append(learner.step(loss).reward_mean)
        model.zero_grad()
    return rewards[1:]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by the compiler's imports
def test_a_model_compiled_to_graphs_has_the_rewards_of_the_plain_one_or_is_refused():
    try:
        rewards = compiled_rewards("reduce-overhead")
    except UsageError as error:
        assert "reduce-overhead" in str(error)  # noqa: PT017  either is right
    else:
        assert rewards == pytest.approx(compiled_rewards(None), rel=1e-9)
