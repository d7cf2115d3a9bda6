"""Building blocks: tables of log-probabilities, sampling from an explicit generator, neutral choices."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inloop import Bernoulli, Categorical, Mixture, MixturePolicy
from inloop.errors import UsageError
from inloop.policies.mixture import log_inverted_softmax


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------ mixture


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=6))
def test_inverted_softmax_is_one_minus_softmax(scores):
    scores_K = torch.tensor(scores, dtype=torch.float64)
    expected = (1 - scores_K.softmax(0)) / (len(scores) - 1)
    torch.testing.assert_close(log_inverted_softmax(scores_K).exp(), expected, rtol=1e-9, atol=1e-12)


def test_inverted_softmax_stays_precise_where_one_minus_softmax_rounds_to_zero():
    scores_K = torch.tensor([60.0, 0.0, 0.0], requires_grad=True)
    log_p_K = log_inverted_softmax(scores_K)
    torch.testing.assert_close(log_p_K[0].detach(), torch.tensor(-60.0))  # log(2 e^-60 / 2)
    log_p_K[0].backward()
    assert scores_K.grad.isfinite().all()
    assert scores_K.grad[0] < -0.9


def test_the_highest_score_loses_and_nobody_wins_more_than_its_share():
    policy = MixturePolicy(4, form="inverted")
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([30.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(policy.probabilities(), torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3]))
    softmax = MixturePolicy(4, form="softmax")
    softmax.load_state_dict(policy.state_dict())
    torch.testing.assert_close(softmax.probabilities(), torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("form", ["inverted", "softmax"])
def test_the_floor_holds(form):
    policy = MixturePolicy(4, form=form, floor=0.1)
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([50.0, -50.0, 3.0, 0.0]))
    p_K = policy.probabilities()
    assert p_K.min() >= 0.1 - 1e-6
    torch.testing.assert_close(p_K.sum(), torch.tensor(1.0))
    raw = MixturePolicy(4, form=form)
    raw.load_state_dict(policy.state_dict())
    torch.testing.assert_close(p_K, (1 - 4 * 0.1) * raw.probabilities() + 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_sources": 1}, "num_sources=1: allowed are whole numbers from 2"),
        ({"num_sources": 2.5}, "num_sources=2.5: allowed are whole numbers from 2"),
        ({"num_sources": 3, "form": "sigmoid"}, "form='sigmoid': allowed are 'bounded', 'inverted' and 'softmax'"),
        ({"num_sources": 4, "floor": 0.25}, "floor=0.25: shares must be at least 0 and add up to less than 1"),
        ({"num_sources": 4, "floor": -0.1}, "floor=-0.1"),
    ],
)
def test_bad_arguments_of_a_mixture_are_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        MixturePolicy(**arguments)


# ------------------------------------------------------------------ all blocks


@pytest.fixture(params=["mixture", "categorical", "bernoulli"])
def policy(request):
    policy = {"mixture": lambda: MixturePolicy(3), "categorical": lambda: Categorical(3), "bernoulli": Bernoulli}[
        request.param
    ]()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(generator=generator(1))
    return policy


def test_probabilities_add_up_and_are_those_of_log_prob(policy):
    p_K = policy.probabilities()
    torch.testing.assert_close(p_K.sum(), torch.tensor(1.0))
    torch.testing.assert_close(policy.log_prob(torch.arange(len(p_K))).exp(), p_K)


def test_samples_follow_the_probabilities(policy):
    n = 20_000
    counts_K = torch.bincount(policy.sample(n, generator()), minlength=policy.num_choices)
    p_K = policy.probabilities()
    assert ((counts_K / n - p_K).abs() < 4 * (p_K * (1 - p_K) / n).sqrt()).all()


def test_samples_come_from_the_generator_alone(policy):
    torch.manual_seed(1)
    first = policy.sample(50, generator(7))
    torch.manual_seed(2)
    assert torch.equal(policy.sample(50, generator(7)), first)
    assert not torch.equal(policy.sample(50, generator(8)), first)


def test_log_prob_is_differentiable(policy):
    actions = policy.sample(10, generator())
    gradients = torch.autograd.grad(policy.log_prob(actions).sum(), list(policy.parameters()))
    assert all(g.abs().sum() > 0 for g in gradients)


def test_the_score_has_mean_zero(policy):
    """E[∇ log p] = 0, which REINFORCE rests on."""
    p_K = policy.probabilities()
    log_p_K = policy.log_prob(torch.arange(len(p_K)))
    (gradient,) = torch.autograd.grad((p_K * log_p_K).sum(), list(policy.parameters()))
    assert gradient.abs().max() < 1e-6


def test_empty_and_foreign_actions(policy):
    assert policy.sample(0, generator()).shape == (0,)
    assert policy.log_prob(torch.zeros(0, dtype=torch.long)).shape == (0,)
    with pytest.raises(UsageError, match=f"has the choices 0 to {policy.num_choices - 1}"):
        policy.log_prob(torch.tensor([policy.num_choices]))
    with pytest.raises(UsageError, match="tensor of integers"):
        policy.log_prob(torch.rand(3))
    with pytest.raises(UsageError, match="got dict"):
        policy.log_prob({"source": torch.zeros(3, dtype=torch.long)})


def test_neutral_choices():
    n = 9000
    counts_K = torch.bincount(MixturePolicy(3).neutral(n, generator()), minlength=3)
    assert (counts_K - n / 3).abs().max() < 4 * (n * 2 / 9) ** 0.5
    assert Bernoulli().neutral(4).tolist() == [0] * 4
    assert Categorical(5, neutral=2).neutral(4).tolist() == [2] * 4
    assert MixturePolicy(3).neutral(4).shape == (4,)  # a generator is optional
    with pytest.raises(UsageError, match=r"neutral=5: allowed are None \(uniform\) and 0 to 4"):
        Categorical(5, neutral=5)


def test_reward_summary():
    policy = MixturePolicy(3)
    summary = policy.summarise(torch.tensor([0, 0, 2, 0]), torch.tensor([1.0, 2.0, 7.0, 6.0]))
    assert summary.count_K.tolist() == [3, 0, 1]
    assert summary.mean_K[[0, 2]].tolist() == [3.0, 7.0]
    assert summary.mean_K[1].isnan()
    torch.testing.assert_close(summary.std_K[0], torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).std())
    assert summary.std_K[1:].isnan().all()


def test_shares_keep_their_limits_and_add_up():
    policy = MixturePolicy(4, form="softmax", floor=[0.1, 0.0, 0.05, 0.0], ceiling=[1.0, 0.4, 1.0, 0.3])
    for scores in ([0.0, 9.0, 0.0, 0.0], [0.0, 9.0, 0.0, 9.0], [-9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
        with torch.no_grad():
            policy.scores.copy_(torch.tensor(scores))
        p_K = policy.probabilities()
        torch.testing.assert_close(p_K.sum(), torch.tensor(1.0))
        assert (p_K >= policy.floor_K - 1e-6).all()
        assert (p_K <= policy.ceiling_K + 1e-6).all()
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    excess = policy.probabilities()  # what source 1 gave up went to the others in proportion
    uncapped = MixturePolicy(4, form="softmax", floor=[0.1, 0.0, 0.05, 0.0])
    uncapped.load_state_dict(policy.state_dict())
    raw = uncapped.probabilities()
    torch.testing.assert_close(excess[0] / excess[2], raw[0] / raw[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ceiling": 0.2}, "ceiling=0.2: each must be above its floor, and they must add up to 1 or more"),
        ({"floor": 0.2, "ceiling": [0.1, 1, 1, 1]}, "each must be above its floor"),
        ({"floor": [0.1, 0.2]}, "give one number, or one for each of the 4 sources"),
    ],
)
def test_bad_limits_are_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        MixturePolicy(4, **arguments)


@pytest.mark.parametrize("form", ["inverted", "softmax"])
def test_a_source_at_its_ceiling_can_come_down_by_its_own_rewards(form):
    policy = MixturePolicy(4, form=form, ceiling=[0.2, 1.0, 1.0, 1.0])
    torch.testing.assert_close(policy.probabilities()[0], torch.tensor(0.2))
    (gradient,) = torch.autograd.grad(policy.log_prob(torch.tensor([0])).sum(), [policy.scores])
    assert gradient.abs().max() > 0.1


def test_limits_stay_finite_at_extreme_scores():
    policy = MixturePolicy(3, form="softmax", floor=[0.1, 0.0, 0.0], ceiling=0.9)
    for scores in ([0.0, 0.0, -120.0], [120.0, 0.0, 0.0], [-120.0, 120.0, -120.0]):
        with torch.no_grad():
            policy.scores.copy_(torch.tensor(scores))
        (gradient,) = torch.autograd.grad(policy.log_prob(torch.tensor([0, 1])).sum(), [policy.scores])
        assert gradient.isfinite().all()
        torch.testing.assert_close(policy.probabilities().sum(), torch.tensor(1.0))
    torch.testing.assert_close(MixturePolicy(10, ceiling=0.1 + 1e-9).probabilities(), torch.full((10,), 0.1))


# ------------------------------------------------------------------ many sources


def quadratic_log_probabilities(scores_K):
    """``logsumexp_{j≠i} s_j - logsumexp_j s_j - log(K - 1)``, with a row of all others for each source."""
    K = len(scores_K)
    others_KK = scores_K.expand(K, K).masked_fill(torch.eye(K, dtype=torch.bool), float("-inf"))
    return others_KK.logsumexp(dim=1) - scores_K.logsumexp(dim=0) - torch.tensor(K - 1.0).double().log()


@pytest.mark.parametrize("scores", ["even", "random", "equal", "two largest"])
@pytest.mark.parametrize("K", [2, 3, 50])
def test_log_probabilities_and_their_gradient_are_those_of_the_obvious_formula(K, scores):
    policy = MixturePolicy(K, form="inverted").double()
    with torch.no_grad():
        policy.scores.copy_(
            {
                "even": torch.linspace(-40, 40, K),
                "random": torch.rand(K, generator=generator()) * 80 - 40,
                "equal": torch.full((K,), 3.0),
                "two largest": torch.linspace(-40, 40, K).index_fill(0, torch.tensor([0, K - 1]), 40.0),
            }[scores]
        )
    weights_K = torch.randn(K, generator=generator(), dtype=torch.float64)
    scores_K = policy.scores.detach().clone().requires_grad_()
    log_p_K, expected_K = policy.log_probabilities(), quadratic_log_probabilities(scores_K)
    torch.testing.assert_close(log_p_K, expected_K, rtol=1e-12, atol=1e-12)
    (gradient_K,) = torch.autograd.grad((weights_K * log_p_K).sum(), [policy.scores])
    (expected_gradient_K,) = torch.autograd.grad((weights_K * expected_K).sum(), [scores_K])
    torch.testing.assert_close(gradient_K, expected_gradient_K, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(part.numel() for part in tree_leaves(out) if isinstance(part, torch.Tensor))])
        return out


def test_ten_thousand_sources_take_memory_for_ten_thousand_numbers():
    K = 10_000
    policy = MixturePolicy(K)
    with torch.no_grad():
        policy.scores.uniform_(-40, 40, generator=generator())
    with LargestTensor() as largest:
        actions = policy.sample(64, generator())
        policy.log_prob(actions).sum().backward()
        p_K = policy.probabilities()
    assert K <= largest.numel <= 2 * K
    torch.testing.assert_close(p_K.sum(), torch.tensor(1.0))
    assert policy.scores.grad.isfinite().all()


@pytest.mark.parametrize("limits", [{"ceiling": 0.6}, {"floor": [0.1, 0.1, 0.1, 0.0]}])
def test_a_prior_of_zero_with_limits(limits):
    policy = MixturePolicy(4, prior=[1, 1, 1, 0], **limits)
    policy.log_prob(torch.tensor([0, 1, 2])).sum().backward()
    assert bool(policy.scores.grad.isfinite().all())
    assert float(policy.probabilities()[3]) == 0
    assert 3 not in policy.neutral(200).tolist()
    assert len(policy.neutral(0)) == 0


def test_shares_may_be_given_by_name():
    mixture = Mixture({"web": (torch.zeros(3),), "books": (torch.zeros(3),)})
    policy = MixturePolicy(mixture, prior={"books": 3.0, "web": 1.0}, floor={"web": 0.2, "books": 0.0})
    assert policy.probabilities().tolist() == pytest.approx([0.4, 0.6])
    with pytest.raises(UsageError, match="prior= is given for web; the sources are web, books"):
        MixturePolicy(mixture, prior={"web": 1.0})
