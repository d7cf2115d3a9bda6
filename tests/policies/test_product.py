"""A policy over (source x operation x strength) is only a composition."""

import pytest
import torch

from inloop import Bernoulli, Categorical, MixturePolicy, Product
from inloop.errors import BatchSizeError, UsageError
from inloop.policies import concatenate, count_actions


@pytest.fixture
def policy():
    policy = Product(
        {
            "source": MixturePolicy(3),
            "operation": Categorical(4, neutral=0),
            "keep": Bernoulli(given=("operation", 4)),
            "strength": Categorical(5, given=("operation", 4)),
        }
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    return policy


def test_log_prob_is_the_sum_over_the_factors(policy):
    actions = policy.sample(30, torch.Generator().manual_seed(0))
    source, operation, keep, strength = (policy.factors[name] for name in actions)
    by_hand = [
        source.log_probabilities()[s]
        + operation.log_probabilities()[o]
        + keep.log_probabilities()[o, d]
        + strength.log_probabilities()[o, k]
        for s, o, d, k in zip(*actions.values(), strict=True)
    ]
    torch.testing.assert_close(policy.log_prob(actions), torch.stack(by_hand))


def test_a_dependent_factor_follows_its_row(policy):
    n = 40_000
    actions = policy.sample(n, torch.Generator().manual_seed(0))
    table = policy.probabilities()["strength"]
    for operation in range(4):
        chosen = actions["strength"][actions["operation"] == operation]
        share_K = torch.bincount(chosen, minlength=5) / len(chosen)
        assert (share_K - table[operation]).abs().max() < 0.03


def test_the_same_generator_gives_the_same_actions(policy):
    first, second = (policy.sample(20, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_neutral_and_summary_have_the_factors_names(policy):
    neutral = policy.neutral(6)
    assert list(neutral) == ["source", "operation", "keep", "strength"]
    assert neutral["operation"].tolist() == neutral["keep"].tolist() == [0] * 6
    summary = policy.summarise(neutral, torch.arange(6.0))
    assert summary["operation"].mean_K[0] == 2.5


def test_products_nest(policy):
    nested = Product({"first": policy, "second": Bernoulli()})
    actions = nested.sample(7, torch.Generator().manual_seed(0))
    assert count_actions(actions) == 7
    assert nested.log_prob(actions).shape == (7,)
    assert count_actions(concatenate([actions, actions])) == 14
    assert nested.sample(0)["first"]["strength"].shape == (0,)


def test_bad_compositions_are_named(policy):
    with pytest.raises(UsageError, match="at least one factor"):
        Product({})
    with pytest.raises(UsageError, match=r"'k' depends on 'o' with 3 choices, but 'o' is no discrete factor before it"):
        Product({"k": Categorical(5, given=("o", 3)), "o": Categorical(3)})
    with pytest.raises(UsageError, match="but 'o' has 4 choices"):
        Product({"o": Categorical(4), "k": Categorical(5, given=("o", 3))})
    with pytest.raises(UsageError, match="Fix: use it inside a Product"):
        Categorical(5, given=("o", 3)).sample(2)
    with pytest.raises(
        UsageError, match=r"are a dict with \['keep', 'operation', 'source', 'strength'\]; got a tensor"
    ):
        policy.log_prob(torch.zeros(3))
    with pytest.raises(BatchSizeError, match="different lengths"):
        count_actions({"a": torch.zeros(2), "b": torch.zeros(3)})
