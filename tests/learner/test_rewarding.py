"""The order of sampling, rewarding and updating in a plain loop, and what a report says of it."""

import copy

import pytest
import torch
import torch.nn.functional as F

from inloop import Categorical, InLoop, MixturePolicy, Product
from inloop.alignment.oracles import align_by_loss
from tests.training import Run, make_net, make_sources, rewards_of, watch_input


def test_step_t_is_rewarded_with_the_gradient_of_step_t_plus_one():
    """The reported rewards are <∇l_i(θ_t), ∇L(θ_{t+1})>, by brute force in float64."""
    run = Run(net=make_net().double(), sources=[(x.double(), y) for x, y in make_sources()])
    expected, previous = [], None
    for _ in range(5):
        actions = run.learner.sample(16)
        x, y = run.mixture.draw(actions)
        losses_N = F.cross_entropy(run.model(x), y, reduction="none")
        losses_N.mean().backward(retain_graph=True)
        g = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.learner.step(losses_N.mean())
        if previous is not None:
            model_before, x_before, y_before = previous
            losses_before = F.cross_entropy(model_before(x_before), y_before, reduction="none")
            expected.append(align_by_loss(model_before, losses_before, g))
        previous = copy.deepcopy(run.model), x, y
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)  # the reference is the gradient before clipping
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [report.rewarded for report in run.reports] == [False, True, True, True, True]
    for report, rewards_N in zip(run.reports[1:], expected, strict=True):
        assert report.reward_mean == pytest.approx(float(rewards_N.mean()), rel=1e-9)
        assert report.reward_std == pytest.approx(float(rewards_N.std()), rel=1e-9)


def test_the_policy_first_moves_after_accumulate_rewarded_steps():
    run = Run(accumulate=3).train(8)
    assert [report.updated for report in run.reports] == [False, False, False, True, False, False, True, False]
    assert torch.equal(run.reports[2].probabilities, torch.full((4,), 0.25))
    assert not torch.equal(run.reports[3].probabilities, torch.full((4,), 0.25))


def test_start_after_only_delays_the_policy():
    run = Run(accumulate=1, start_after=4).train(7)
    assert [report.updated for report in run.reports] == [False] * 5 + [True, True]
    assert all(report.rewarded for report in run.reports[1:])
    assert rewards_of(run)[1:5] == rewards_of(Run(update=False).train(7))[1:5]


def test_watching_reports_rewards_and_changes_nothing():
    run = Run(update=False).train(6)
    assert torch.equal(run.policy.scores, torch.zeros(4))
    assert not any(report.updated for report in run.reports)
    assert all(report.rewarded and report.rewards.count_K.sum() == 64 for report in run.reports[1:])


def test_interleaving_rewards_every_second_step_and_samples_neutrally_in_between():
    policy = Product({"source": MixturePolicy(4), "operation": Categorical(3, neutral=1)})
    run = Run(policy=policy, accumulate=1, interleave=True)
    neutral_steps = []
    for _ in range(6):
        actions = run.learner.sample(32)
        neutral_steps.append(bool((actions["operation"] == 1).all()))
        x, y = run.mixture.draw(actions)
        is_held = watch_input(run.model[2])
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        assert is_held() != neutral_steps[-1]  # a plain step is not recorded
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert neutral_steps == [False, True] * 3
    assert [report.rewarded for report in run.reports] == [False, True] * 3
    assert set(run.reports[1].rewards) == {"source", "operation"}


def test_micro_batches_are_one_step():
    """Accumulating the gradient over micro-batches gives the rewards of the whole batch."""
    sources = [(x.double(), y) for x, y in make_sources()]
    whole, parts = (Run(net=make_net().double(), sources=sources, accumulate=1) for _ in range(2))
    actions = whole.learner.sample(12)
    batch = whole.mixture.draw(actions)
    for number in range(3):
        if number:
            whole.learner.use(actions)
        x, y = batch
        loss = F.cross_entropy(whole.model(x), y)
        loss.backward()
        whole.learner.step(loss)
        whole.optimizer.step()
        whole.optimizer.zero_grad()

        total = 0.0
        for part in (slice(0, 5), slice(5, 12)):
            parts.learner.use(actions[part])
            loss = F.cross_entropy(parts.model(x[part]), y[part], reduction="sum") / 12
            loss.backward()
            total += loss.detach()
        parts.learner.step(total)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert rewards_of(parts)[1:] == pytest.approx(rewards_of(whole)[1:], rel=1e-9)
    torch.testing.assert_close(parts.policy.scores, whole.policy.scores)


def test_an_empty_batch_is_not_rewarded():
    run = Run(accumulate=1, reduction="sum").train(3)
    run.learner.sample(0)
    run.model(torch.zeros(0, 16)).sum().backward()
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.learner.step(0.0)
    run.optimizer.zero_grad()
    assert not run.step().rewarded
    assert run.step().rewarded


def test_a_penalty_may_be_differentiated_after_the_learners_step():
    run = Run(accumulate=1)
    for _ in range(5):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        report = run.learner.step(loss)
        (1e-3 * sum(parameter.square().sum() for parameter in run.model.parameters())).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert report.rewarded
    assert report.num_dropped <= 1  # until it is known that there is more than one pass


def test_freezing_and_unfreezing_in_the_middle_of_a_run():
    run = Run(accumulate=1, verify=True).train(3)
    run.model[0].requires_grad_(False)
    run.train(3)
    assert run.reports[-1].rewarded
    run.model[0].requires_grad_(True)
    run.train(3)
    assert run.reports[-1].rewarded
    assert run.learner.num_dropped == 0


def test_options_reach_what_they_are_for():
    by_seed = [
        InLoop(make_net(), MixturePolicy(4), generator=torch.Generator().manual_seed(s)).sample(50) for s in (1, 1, 2)
    ]
    assert torch.equal(by_seed[0], by_seed[1])
    assert not torch.equal(by_seed[0], by_seed[2])
    policy = MixturePolicy(4)
    frozen = Run(policy=policy, accumulate=1, optimizer=torch.optim.SGD(policy.parameters(), lr=0.0)).train(4)
    assert torch.equal(frozen.policy.scores, torch.zeros(4))
    assert frozen.reports[-1].updated
    assert Run(accumulate=1).learner.update.optimizer.defaults["lr"] == 0.1
    by_mean, by_sum = Run().train(2), Run(reduction="sum").train(2)
    assert by_mean.reports[1].reward_mean == pytest.approx(64 * by_sum.reports[1].reward_mean, rel=1e-5)
    copying = Run(copy_inputs=True)
    x, y = copying.mixture.draw(copying.learner.sample(8))
    F.cross_entropy(copying.model(x), y).backward()
    copying.learner.step(1.0)
    x.zero_()
    copying.optimizer.zero_grad()
    assert copying.step().rewarded


def test_reports_carry_what_a_user_wants_to_see():
    run = Run(accumulate=1).train(3)
    report = run.reports[-1]
    assert report.step == 3
    assert report.lag == 0
    assert report.num_dropped == 0
    assert report.dropped is None
    torch.testing.assert_close(report.probabilities, run.policy.probabilities())
    assert report.rewards.mean_K.shape == report.rewards.std_K.shape == (4,)
    assert run.learner.num_steps == 3


def test_several_callbacks_get_every_report():
    first, second = [], []
    Run(callback=[first.append, second.append]).train(3)
    Run(callback=None).train(3)
    assert len(first) == 3
    assert first == second
