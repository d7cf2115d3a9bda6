"""Bad sources and harmful operations are found, and among equal ones none is singled out."""

import pytest
import torch
import torch.nn.functional as F

from inloop import Bernoulli, Categorical, MixturePolicy, Product
from tests.training import Run, make_sources


@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_source_is_pushed_down(seed):
    run = Run(make_sources(5, poisoned=2, seed=seed), seed=seed).train(200, batch_size=256)
    p_K = run.policy.probabilities()
    assert int(p_K.argmin()) == 2
    assert p_K[2] < 0.03
    assert interval_of_advantage(run)[1][2] < 0  # and its rewards say why


@pytest.mark.parametrize("seed", range(4))
def test_among_equal_sources_the_rewards_single_out_none(seed):
    run = Run(make_sources(5, seed=seed), seed=seed).train(200, batch_size=256)
    low_K, high_K = interval_of_advantage(run)
    assert (low_K < 0).all()
    assert (high_K > 0).all()


def interval_of_advantage(run):
    """Mean over steps of (source's mean reward - step's mean) / step's std: +- 4 standard errors."""
    advantage_TK = torch.stack([(r.rewards.mean_K - r.reward_mean) / r.reward_std for r in run.reports if r.rewarded])
    mean_K = advantage_TK.nanmean(dim=0)
    error_K = (advantage_TK - mean_K).square().nanmean(dim=0).sqrt() / len(advantage_TK) ** 0.5
    return mean_K - 4 * error_K, mean_K + 4 * error_K


def test_a_composed_policy_learns_its_harmful_operation():
    """Operation 2 shuffles the features of an example; the policy over source x operation learns to leave it."""
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3, neutral=0), "keep": Bernoulli()})
    run = Run(policy=policy, accumulate=2)
    for _ in range(300):
        actions = run.learner.sample(64)
        x, y = run.mixture.draw(actions)
        x = torch.where((actions["operation"] == 2)[:, None], x.flip(1), x)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    operations = policy.probabilities()["operation"]
    assert int(operations.argmin()) == 2
    assert operations[2] < 0.1


def test_a_frozen_part_of_a_policy_stays():
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3)})
    policy.factors["operation"].requires_grad_(False)
    run = Run(policy=policy, accumulate=1).train(5)
    assert run.reports[-1].updated
    assert torch.equal(policy.factors["operation"].logits, torch.zeros(3))
    assert not torch.equal(policy.factors["source"].scores, torch.zeros(4))
