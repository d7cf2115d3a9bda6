"""The anchored rule: it stays at its prior without evidence, leaves it on evidence, and comes back when the evidence does."""

import copy
import math

import pytest
import torch

import inloop
from inloop import MixturePolicy
from inloop.errors import UsageError
from inloop.policies import Shares
from inloop.references import HeldOut, Next, Trail
from inloop.rewards import GradientAlignment, NextStepLoss
from inloop.step import Draw
from inloop.updates import Anchored
from inloop.updates.anchored import EVERY, LOWEST, scores


class Game:
    """Rewards are noise, and a constant for each source; the policy draws, the rule moves it."""

    def __init__(self, shift_K, n=128, seed=0, policy=None, reference=None, **options):
        self.policy = policy or MixturePolicy(len(shift_K), form="bounded")
        self.rule = Anchored(**options)
        self.rule.attach(self.policy, GradientAlignment(), reference or Next())
        self.shift_K, self.n = torch.tensor(shift_K), n
        self.generator = torch.Generator().manual_seed(seed)

    def play(self, steps):
        for _ in range(steps):
            actions = self.policy.sample(self.n, self.generator)
            rewards_N = torch.randn(self.n, generator=self.generator) + self.shift_K[actions]
            self.rule.add([Draw(actions, (self.n,), copy.deepcopy(self.policy), 0)], rewards_N)
        return self.policy.probabilities()


@pytest.mark.parametrize("n", [8, 32, 128])
def test_equal_sources_stay_near_their_prior(n):
    least = [float(Game([0.0] * 10, n=n, seed=seed).play(300).min()) for seed in range(5)]
    assert min(least) > 0.03
    assert sum(least) / len(least) > 0.06


def test_any_number_of_bad_sources_is_dropped():
    shares = Game([-0.5, -0.5, -0.5, *[0.0] * 7]).play(200)
    assert float(shares[:3].sum()) < 0.03
    assert float(shares[3:].min()) > 0.11


def test_no_source_wins_all():
    shares = Game([2.0, *[0.0] * 9], reference=HeldOut(lambda: torch.zeros(()))).play(200)
    assert 0.15 < float(shares[0]) < 0.2  # at most twice its odds


def test_what_the_policy_draws_itself_raises_nothing():
    shares = Game([2.0, *[0.0] * 9]).play(200)
    assert float(shares[0]) < 0.11


def test_a_dropped_source_that_becomes_good_comes_back():
    game = Game([-0.5, *[0.0] * 4])
    assert float(game.play(200)[0]) < 0.05
    game.shift_K = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0])
    assert float(game.play(1500)[0]) > 0.19


def test_it_is_anchored_at_the_prior_of_the_policy():
    policy = MixturePolicy(4, form="bounded", prior=[0.4, 0.3, 0.3, 0.0])
    shares = Game([0.0, -0.6, 0.0, 0.0], policy=policy, caution=4.0).play(200)
    assert float(shares[3]) == 0
    assert float(shares[1]) < 0.05
    torch.testing.assert_close(shares[0] / shares[2], torch.tensor(4 / 3), rtol=0.15, atol=0)


def test_the_rewards_of_a_trail_do_not_move_the_policy():
    torch.testing.assert_close(Game([-1.0, 2.0, 2.0], reference=Trail()).play(100), torch.full((3,), 1 / 3))


def test_the_advantage_is_that_of_the_source_over_the_others():
    game = Game([-0.3, 0.0, 0.1], caution=1e9)  # it never moves
    game.play(2000)
    a_K, se_K = game.rule._evidence.estimate()
    torch.testing.assert_close(a_K, torch.tensor([-0.35, 0.1, 0.25]).double(), atol=0.06, rtol=0)
    assert bool((se_K < 0.04).all())


def test_scores_are_the_gradients_of_log_p_one_by_one():
    policy = MixturePolicy(5, form="bounded")
    with torch.no_grad():
        policy.scores.copy_(torch.randn(5))
    actions = torch.tensor([0, 3, 3, 1])
    rows = [torch.autograd.grad(policy.log_prob(actions)[i], policy.scores)[0] for i in range(4)]
    torch.testing.assert_close(scores(policy, actions), torch.stack(rows).double())


def test_it_moves_products_factor_by_factor():
    policy = inloop.Product({"source": MixturePolicy(3, form="bounded"), "flip": inloop.Bernoulli()})
    rule = Anchored()
    rule.attach(policy, GradientAlignment())
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        actions = policy.sample(64, generator)
        rewards_N = torch.randn(64, generator=generator) - 0.6 * (actions["source"] == 1) + 0.6 * actions["flip"]
        rule.add([Draw(actions, (64,), copy.deepcopy(policy), 0)], rewards_N)
    shares = policy.probabilities()
    assert float(shares["source"][1]) < 0.05
    assert float(shares["flip"][1]) > 0.6


def test_a_state_continues_bit_for_bit():
    one, other = Game([-0.3, 0.0, 0.0]), Game([-0.3, 0.0, 0.0])
    one.play(25)
    other.policy.load_state_dict(one.policy.state_dict())
    other.rule.load_state_dict(one.rule.state_dict())
    other.generator.set_state(one.generator.get_state())
    assert torch.equal(one.play(35), other.play(35))
    with pytest.raises(UsageError, match="The state is of a policy with 3 parameters; this one has 4"):
        Game([0.0] * 4).rule.load_state_dict(one.rule.state_dict())


@pytest.mark.parametrize("n", [1, 2])
def test_tiny_batches_change_nothing_without_evidence(n):
    shares = Game([0.0, 0.0, 0.0], n=n).play(20 * EVERY)
    assert bool(shares.isfinite().all())
    assert float(shares.min()) > 0.1


def test_ten_thousand_sources():
    game = Game([0.0] * 10_000, n=300)
    game.play(EVERY)
    assert bool(game.rule._evidence.sums.any())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Anchored(temperature=0), "temperature=0: allowed are numbers above 0"),
        (lambda: Anchored().attach(Shares.uniform(3), GradientAlignment()), "has no parameters to learn"),
        (
            lambda: Anchored().attach(MixturePolicy(3, form="bounded"), NextStepLoss()),
            "NextStepLoss is not made for that",
        ),
        (lambda: Anchored().attach(MixturePolicy(3, form="inverted"), GradientAlignment()), "Fix: MixturePolicy"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_the_lowest_odds():
    shares = Game([-5.0, *[0.0] * 9]).play(200)
    odds = float(shares[0] / shares[1])
    assert odds == pytest.approx(torch.tensor(LOWEST).exp().item(), rel=0.05)


def nothing():
    return torch.zeros(3, dtype=torch.bool)


class Known:
    """Of three sources the first surprises the model, and the second does not learn."""

    labels_are_told = True

    def surprising(self):
        return torch.tensor([True, False, False])

    def not_learning(self):
        return torch.tensor([False, True, False])

    def stagnant(self):
        return torch.tensor([False, True, False])


@pytest.mark.parametrize(("reference", "moves"), [(Next(), False), (HeldOut(lambda: torch.zeros(())), True)])
def test_where_logits_are_told_only_held_out_rewards_count(reference, moves):
    game = Game([0.0, 0.0, -2.0], reference=reference)
    game.rule.sources = Known()
    game.rule.sources.surprising = game.rule.sources.not_learning = game.rule.sources.stagnant = nothing
    assert (float(game.play(100)[2]) < 0.1) == moves


@pytest.mark.parametrize(("is_stagnant", "moves"), [(True, True), (False, False)])
def test_where_logits_are_told_rewards_lower_only_sources_that_have_not_learned(is_stagnant, moves):
    """Bytes that are drawn alike surprise nobody, once the model expects them, and their loss equals a constant prediction's."""
    game = Game([0.0, 0.0, -2.0])
    game.rule.sources = known = Known()
    known.surprising = known.not_learning = nothing
    known.stagnant = lambda: torch.tensor([False, False, is_stagnant])
    assert (float(game.play(100)[2]) < 0.1) == moves


@pytest.mark.parametrize(("reward", "share"), [(2.0, 0.5), (-2.0, 0.05)])
def test_a_judge_that_is_not_training_data_decides(reward, share):
    """It raises a source whose labels surprise the model, or that does not learn."""
    for which in ("surprising", "not_learning"):
        game = Game([0.0, 0.0, reward], reference=HeldOut(lambda: torch.zeros(())))
        game.rule.sources = known = Known()
        known.surprising = known.not_learning = known.stagnant = nothing
        setattr(known, which, lambda: torch.tensor([False, False, True]))
        assert float(game.play(100)[2]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("reference", [Next(), Trail()])
@pytest.mark.parametrize("rewards", ["random", "equal"])
def test_what_is_known_of_sources_lowers_them_whatever_their_rewards(reference, rewards):
    policy = MixturePolicy(3)
    rule = Anchored()
    rule.attach(policy, GradientAlignment(), reference, Known())
    generator = torch.Generator().manual_seed(0)
    for _ in range(EVERY):
        actions = policy.sample(64, generator)
        rewards_N = torch.randn(64, generator=generator) if rewards == "random" else torch.ones(64)
        rule.add([Draw(actions, (64,), copy.deepcopy(policy), 0)], rewards_N)
    odds = policy.probabilities() / policy.probabilities()[2]
    torch.testing.assert_close(odds, torch.tensor([1 / 4, math.exp(-3), 1.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("factor", ["operation", "source"])
def test_labels_that_are_told_are_about_mixtures_only(factor):
    """Rewards go on moving other choices."""
    policy = inloop.Product({"source": MixturePolicy(3), "operation": inloop.Categorical(3)})
    rule = Anchored()
    known = Known()
    known.surprising = known.not_learning = known.stagnant = nothing
    rule.attach(policy, GradientAlignment(), Next(), known)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        actions = policy.sample(64, generator)
        rewards_N = torch.randn(64, generator=generator) - 2.0 * (actions[factor] == 1)
        rule.add([Draw(actions, (64,), copy.deepcopy(policy), 0)], rewards_N)
    assert (float(policy.probabilities()[factor][1]) < 0.1) == (factor == "operation")


def test_a_second_learner_on_one_policy_begins_at_the_prior():
    policy = MixturePolicy(3)
    for _ in range(3):
        game = Game([-1.0, 0.0, 0.0], policy=policy)
        share = float(game.play(100)[0])
        game.rule.detach()
    assert share > 0.02


def test_nothing_changed_is_no_update():
    game = Game([0.0, 0.0], caution=1e9)
    game.play(5 * EVERY)
    assert game.rule.version == 0
