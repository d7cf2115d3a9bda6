"""The verdict on a source: from its rewards, with an interval over steps that stays valid under repeated looks."""

import math

import pytest
import torch

from inloop.errors import UsageError
from inloop.policies.policy import summarise_by_choice
from inloop.report import StepReport, effective_number, is_collapsing
from inloop.verdicts import SourceStatistics
from inloop.verdicts.advantage import width


def report(rewards_N, source_N, num_sources, probabilities=None):
    return StepReport(
        step=1,
        lag=0,
        dropped=None,
        num_dropped=0,
        probabilities=torch.full((num_sources,), 1 / num_sources) if probabilities is None else probabilities,
        reward_mean=float(rewards_N.mean()),
        reward_std=float(rewards_N.std()),
        rewards=summarise_by_choice(source_N, num_sources, rewards_N),
    )


def statistics_of(shift_K, steps=100, n=200, seed=0, sources=None, **options):
    """Rewards that are noise, shared noise of the step included, plus a constant for each source."""
    generator = torch.Generator().manual_seed(seed)
    statistics = SourceStatistics(sources or len(shift_K), **options)
    for _ in range(steps):
        source_N = torch.randint(0, len(shift_K), (n,), generator=generator)
        rewards_N = (
            torch.randn(n, generator=generator)
            + torch.tensor(shift_K)[source_N]
            + 5 * torch.randn(1, generator=generator)
        )
        statistics.add(report(rewards_N, source_N, len(shift_K)))
    return statistics


def test_a_bad_source_is_named_and_measured():
    statistics = statistics_of([0.0, 0.0, -0.3, 0.0, 0.0])
    assert statistics.flagged() == [2]
    verdict = statistics.verdicts()[2]
    assert verdict.low < -0.3 < verdict.high
    assert verdict.examples == pytest.approx(4000, rel=0.1)


def test_two_bad_sources_are_both_named():
    assert statistics_of([0.0, -0.4, -0.4, 0.0, 0.0]).flagged() == [1, 2]


@pytest.mark.parametrize(("steps", "num_sources"), [(60, 10), (300, 4)])
def test_equal_sources_are_rarely_flagged_however_often_one_looks(steps, num_sources):
    """At level 0.95 at most one run in twenty ever flags any; here 100 runs with a look after every step, and a least effect of zero."""

    def ever_flags(seed):
        generator = torch.Generator().manual_seed(seed)
        statistics = SourceStatistics(num_sources, least_effect=0.0)
        for _ in range(steps):
            source_N = torch.randint(0, num_sources, (64,), generator=generator)
            rewards_N = torch.randn(64, generator=generator) + 5 * torch.randn(1, generator=generator)
            statistics.add(report(rewards_N, source_N, num_sources))
            if bool((statistics.advantages.interval(0.95)[1] < 0).any()):
                return True
        return False

    assert sum(ever_flags(seed) for seed in range(100)) <= 5


def test_nothing_is_said_of_a_source_that_was_hardly_seen():
    """A source that the policy has starved must not be called bad for one example."""
    statistics = statistics_of([0.0, 0.0], steps=50)
    few = SourceStatistics(3)
    sums = statistics.advantages.state_dict()["sums"]
    few.advantages.load_state_dict({"sums": torch.cat([sums, torch.zeros(5, 1)], dim=1)})
    few.add(report(torch.tensor([0.0, 0.1, -9.0, 0.2]), torch.tensor([0, 1, 2, 0]), 3))
    verdict = few.verdicts()[2]
    assert verdict.examples == 1
    assert verdict.advantage < -1
    assert math.isnan(verdict.high)
    assert verdict.word == "undecided"


def test_the_width_of_the_interval():
    """A little wider than that of a single look, which has 2.81 errors at this level, and never by much."""
    assert math.isnan(width(19, 0.005))
    assert 3.5 < width(100, 0.005) < 4
    assert width(10_000, 0.005) < 4.5


def test_a_difference_that_is_certain_but_tiny_is_none():
    statistics = statistics_of([0.0, -0.019, 0.0], steps=10_000, n=200)
    assert statistics.verdicts()[1].high < 0
    assert statistics.flagged() == []


def test_the_running_sums_give_the_obvious_weighted_mean_and_error():
    generator = torch.Generator().manual_seed(1)
    statistics, parts = SourceStatistics(2), []
    for _ in range(30):
        source_N = torch.randint(0, 2, (9,), generator=generator)
        rewards_N = torch.randn(9, generator=generator)
        step = report(rewards_N, source_N, 2)
        statistics.add(step)
        mean_0, mean_1 = rewards_N[source_N == 0].mean(), rewards_N[source_N == 1].mean()
        parts.append((int((source_N == 0).sum()), float((mean_0 - mean_1) / rewards_N.std())))
    n_T, d_T = torch.tensor(parts, dtype=torch.float64).T
    mean = (n_T * d_T).sum() / n_T.sum()
    steps = n_T.sum() ** 2 / n_T.square().sum()
    error = ((n_T * (d_T - mean)) ** 2).sum().sqrt() / n_T.sum() * (steps / (steps - 1)).sqrt()
    verdict = statistics.verdicts()[0]
    assert verdict.advantage == pytest.approx(float(mean))
    assert verdict.high - verdict.advantage == pytest.approx(width(float(steps), 0.025) * float(error))


def test_steps_that_say_nothing_are_passed_over():
    statistics = SourceStatistics(3)
    statistics.add(StepReport(step=1, lag=0, dropped=None, num_dropped=0, probabilities=torch.ones(3) / 3))
    statistics.add(report(torch.ones(6), torch.arange(6) % 3, 3))  # no spread: a reward for the whole batch
    statistics.add(report(torch.randn(6), torch.zeros(6, dtype=torch.long), 3))  # nothing to compare with
    assert statistics.flagged() == []
    assert all(math.isnan(verdict.advantage) for verdict in statistics.verdicts())


def test_a_source_may_be_undecided():
    assert [v.word for v in statistics_of([-0.3, -0.03, 0.2]).verdicts()] == ["flagged", "undecided", "ok"]


def test_state_and_arguments():
    first, second = statistics_of([0.0, -0.3]), SourceStatistics(2)
    second.load_state_dict(first.state_dict())
    assert str(second) == str(first)
    with pytest.raises(UsageError, match="The state is of 2 sources; this has 3"):
        SourceStatistics(3).load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match=r"SourceStatistics\(3\) got the rewards of 2 sources"):
        SourceStatistics(3).add(report(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]), 2))
    with pytest.raises(UsageError, match="level=1.5"):
        SourceStatistics(3, level=1.5)


def test_collapse():
    assert effective_number([0.25] * 4) == pytest.approx(4)
    assert effective_number([1.0, 0.0, 0.0]) == 1
    assert not is_collapsing([0.0, *[1 / 9] * 9])  # one source dropped
    assert is_collapsing([0.7, 0.2, *[0.1 / 8] * 8])
    assert not is_collapsing([0.02, 0.98])  # of two, one may deserve everything


def test_the_learner_warns_once_when_its_policy_collapses(caplog):
    from inloop import MixturePolicy
    from tests.training import Run

    policy = MixturePolicy(4, form="softmax")
    run = Run(policy=policy, accumulate=1000).train(1)
    assert not run.reports[-1].collapsing
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([8.0, 0.0, 0.0, 0.0]))
    run.train(3)
    assert run.reports[-1].collapsing
    assert caplog.text.count("the policy is collapsing") == 1
    assert f"the largest has a share of {max(run.reports[-1].shares):.2f}" in caplog.text


def test_a_fixed_mixture_cannot_collapse(caplog):
    from inloop.policies import Shares
    from tests.training import Run

    Run(policy=Shares([0.97, 0.01, 0.01, 0.01])).train(3)
    assert "collapsing" not in caplog.text
