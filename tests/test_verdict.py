"""The verdict on a source: from its rewards, with an interval over steps, corrected for the number of sources."""

import math

import pytest
import torch

from inloop.errors import UsageError
from inloop.policies.policy import RewardSummary, summarise_by_choice
from inloop.report import StepReport, effective_number, is_collapsing
from inloop.verdict import RewardStatistics


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


def statistics_of(shift_K, steps=100, n=200, seed=0, **options):
    """Rewards that are noise, shared noise of the step included, plus a constant for each source."""
    generator = torch.Generator().manual_seed(seed)
    statistics = RewardStatistics(len(shift_K), **options)
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
    assert statistics.bad_sources() == [2]
    verdict = statistics.verdicts()[2]
    assert verdict.low < -0.3 < verdict.high
    assert verdict.examples == pytest.approx(4000, rel=0.1)


def test_two_bad_sources_are_both_named():
    assert statistics_of([0.0, -0.4, -0.4, 0.0, 0.0]).bad_sources() == [1, 2]


def test_equal_sources_are_rarely_called_bad():
    """At level 0.95 at most one run in twenty names any; here 100 runs, and a least effect of zero."""
    runs = [statistics_of([0.0] * 10, steps=60, seed=seed, least_effect=0.0) for seed in range(100)]
    assert sum(bool(run.bad_sources()) for run in runs) <= 8


def test_a_difference_that_is_certain_but_tiny_is_none():
    assert statistics_of([0.0, -0.015, 0.0], steps=20_000, n=30).verdicts()[1].high < 0
    assert statistics_of([0.0, -0.015, 0.0], steps=20_000, n=30).bad_sources() == []


def test_the_running_sums_give_the_obvious_weighted_mean_and_error():
    generator = torch.Generator().manual_seed(1)
    statistics, parts = RewardStatistics(2), []
    for _ in range(30):
        source_N = torch.randint(0, 2, (9,), generator=generator)
        rewards_N = torch.randn(9, generator=generator)
        step = report(rewards_N, source_N, 2)
        statistics.add(step)
        mean_0, mean_1 = rewards_N[source_N == 0].mean(), rewards_N[source_N == 1].mean()
        parts.append((int((source_N == 0).sum()), float((mean_0 - mean_1) / rewards_N.std())))
    n_T, d_T = torch.tensor(parts, dtype=torch.float64).T
    mean = (n_T * d_T).sum() / n_T.sum()
    error = ((n_T * (d_T - mean)) ** 2).sum().sqrt() / n_T.sum()
    verdict = statistics.verdicts()[0]
    assert verdict.advantage == pytest.approx(float(mean))
    assert verdict.high - verdict.advantage == pytest.approx(2.2414 * float(error), rel=1e-3)  # z(1 - 0.05 / 2 / 2)


def test_steps_that_say_nothing_are_passed_over():
    statistics = RewardStatistics(3)
    statistics.add(StepReport(step=1, lag=0, dropped=None, num_dropped=0, probabilities=torch.ones(3) / 3))
    statistics.add(report(torch.ones(6), torch.arange(6) % 3, 3))  # no spread: a reward for the whole batch
    statistics.add(report(torch.randn(6), torch.zeros(6, dtype=torch.long), 3))  # nothing to compare with
    assert statistics.bad_sources() == []
    assert all(math.isnan(verdict.advantage) for verdict in statistics.verdicts())


def test_state_and_arguments():
    first, second = statistics_of([0.0, -0.3]), RewardStatistics(2)
    second.load_state_dict(first.state_dict())
    assert second.verdicts() == first.verdicts()
    with pytest.raises(UsageError, match="level=1.5"):
        RewardStatistics(3, level=1.5)
    summary = RewardSummary(torch.ones(2), torch.zeros(2), torch.zeros(2))
    assert summary.count_K.sum() == 2


def test_collapse():
    assert effective_number([0.25] * 4) == pytest.approx(4)
    assert effective_number([1.0, 0.0, 0.0]) == 1
    assert not is_collapsing([0.0, *[1 / 9] * 9])  # one source dropped
    assert is_collapsing([0.7, 0.2, *[0.1 / 8] * 8])


def test_the_learner_warns_once_when_its_policy_collapses(caplog):
    from inloop import MixturePolicy
    from tests.training import Run

    policy = MixturePolicy(4, form="softmax")
    run = Run(policy=policy, dry_run=True).train(1)
    assert not run.reports[-1].collapsing
    with torch.no_grad():
        policy.scores.copy_(torch.tensor([8.0, 0.0, 0.0, 0.0]))
    run.train(3)
    assert run.reports[-1].collapsing
    assert caplog.text.count("the policy is collapsing") == 1
