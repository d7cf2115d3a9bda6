"""Steps that are not finite, given up, forgotten, skipped or paused: nothing of them is left, and training goes on."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop.errors import BatchSizeError, OverwrittenTensorError, UsageError
from inloop.rewards import Reward
from tests.training import Run, rewards_of, watch_input

# ------------------------------------------------------------------ steps that are dropped


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_dropped_counted_and_logged(what, caplog):
    run = Run(accumulate=1).train(3)
    before = run.policy.scores.detach().clone()
    x, y = run.mixture.draw(run.learner.sample(16))
    loss = F.cross_entropy(run.model(x), y)
    if what == "loss":
        loss = loss * float("nan")
    loss.backward()
    if what == "gradient":
        run.model[0].weight.grad[0, 0] = float("inf")
    with caplog.at_level(logging.WARNING, logger="inloop"):
        report = run.learner.step(loss)
    run.optimizer.zero_grad()
    assert not report.rewarded
    assert report.num_dropped == 1
    assert report.dropped == {"loss": "the loss is nan", "gradient": "the gradient of '0.weight' is not finite"}[what]
    assert report.dropped in caplog.text
    assert torch.equal(run.policy.scores, before)
    assert run.learner.reference.waiting is None
    assert not run.step().rewarded  # there is nothing left to reward
    assert run.step().updated
    assert run.policy.scores.isfinite().all()


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ([], "the loss is nan;"),
        (["2.bias"], "the loss is nan; parameter '2.bias' is not finite, so no later loss will be;"),
        (["0.weight", "2.bias"], "the loss is nan; parameter '0.weight' and 1 more is not finite"),
    ],
    ids=["none", "one", "two"],
)
def test_a_loss_that_stays_nan_is_warned_of_less_and_less_often_with_a_parameter_that_is_not_finite(
    broken, named, caplog
):
    run = Run(accumulate=1)
    with torch.no_grad():
        for name in broken:
            run.model.get_parameter(name).view(-1)[0] = float("nan")

    def step(factor=float("nan")):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(run.model(x), y) * factor
        loss.backward()
        report = run.learner.step(loss)
        run.optimizer.zero_grad()
        return report

    reports = [step() for _ in range(15)]
    assert [report.num_dropped for report in reports] == list(range(1, 16))
    assert all(report.dropped.startswith("the loss is nan") for report in reports)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(":")[1] for message in messages] == [f" step {number}" for number in (1, 2, 4, 8)]
    assert all(named in message for message in messages)
    if not broken:
        assert step(factor=1.0).dropped is None
        step()
        assert "step 17: the loss is nan; dropped (16 so far)" in caplog.records[-1].getMessage()  # in a row


def test_rewards_that_are_not_finite_never_reach_the_policy():
    class Broken(Reward):
        needs_tape = False
        normalisation = "step"

        def __call__(self, step, reference):
            return torch.tensor([float("nan")] + [1.0] * (step.num_examples - 1))

    run = Run(reward=Broken(), accumulate=1).train(3)
    assert torch.equal(run.policy.scores, torch.zeros(4))
    assert run.reports[1].dropped == "a reward is not finite"
    assert run.learner.num_dropped == 2


def test_an_overwritten_batch_leaves_no_half_updated_policy():
    run = Run(accumulate=1).train(3)
    x, y = run.mixture.draw(run.learner.sample(8))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward()
    run.learner.step(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    x.zero_()
    before = run.learner.update.state_dict(), run.policy.scores.detach().clone()
    with pytest.raises(OverwrittenTensorError):
        run.step()
    assert torch.equal(run.policy.scores, before[1])
    assert run.learner.update.state_dict()["steps"] == before[0]["steps"]
    assert run.learner.reference.waiting is None
    run.optimizer.zero_grad()
    run.train(2)
    assert run.reports[-1].rewarded


# ------------------------------------------------------------------ steps that are given up


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cleared_first", [False, True])
def test_a_learner_whose_step_is_never_called_warns_and_keeps_nothing(cleared_first, fused, caplog):
    """Fused optimizers do not raise the versions of tensors."""
    run = Run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, fused=fused)
    for _ in range(4):
        x, y = run.mixture.draw(run.learner.sample(16))
        if cleared_first:
            run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
        if not cleared_first:
            run.optimizer.zero_grad()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "or used by the optimizer, without learner.step (2 time(s) in a row)" in warning.getMessage()
    assert run.learner.num_announced == 1
    run.optimizer.zero_grad()
    assert not run.train(3).reports[-1].dropped


def test_nothing_is_recorded_outside_of_a_step():
    run = Run().train(3)
    for _ in range(5):  # the model is trained on by somebody else
        run.optimizer.zero_grad()
        is_held = watch_input(run.model[2])
        loss = F.cross_entropy(run.model(torch.randn(8, 16)), torch.randint(3, (8,)))
        loss.backward()
        assert not is_held()
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert [report.rewarded for report in run.train(3).reports[-3:]] == [True, True, True]


def probe(run, n=64):
    F.cross_entropy(run.model(torch.randn(n, 16)), torch.randint(0, 4, (n,))).backward()


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_that_was_given_up_is_forgotten(sampled):
    """A probe, or a step that was skipped after backward: it is on the tape, but its gradients were cleared."""
    run = Run(accumulate=1).train(4)
    if sampled:
        run.learner.sample(64)
    probe(run)
    run.optimizer.zero_grad()
    run.train(3)
    assert run.reports[-1].rewards.count_K.sum() == 64
    # A pass of an announced batch has judged the step before in part; from then on steps are aligned when learner.step is called.
    assert [report.rewarded for report in run.reports[1:]] == [True, True, True, not sampled, True, True]
    with_probe, without = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        probe(with_probe, 5)
        with_probe.optimizer.zero_grad()
        with_probe.step()
        without.step()
    assert rewards_of(with_probe)[2:] == rewards_of(without)[2:]


def test_skip_forgets_a_batch_whose_forward_failed():
    run = Run(accumulate=1).train(3)
    run.learner.sample(64)
    with pytest.raises(RuntimeError):
        run.model(torch.randn(64, 99))
    run.learner.skip()
    run.train(2)
    assert run.reports[-1].rewards.count_K.sum() == 64
    run.learner.sample(64)
    with pytest.raises(BatchSizeError, match=r"learner.skip\(\)"):
        run.step()


# ------------------------------------------------------------------ passes that do not count


def test_paused_passes_leave_no_trace():
    plain, with_pause = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        plain.step()
        with_pause.step()
        with with_pause.learner.paused():
            F.cross_entropy(with_pause.model(torch.randn(3, 16)), torch.randint(4, (3,))).backward()
        with_pause.optimizer.zero_grad()
    assert torch.equal(plain.policy.scores, with_pause.policy.scores)
    assert rewards_of(plain)[1:] == rewards_of(with_pause)[1:]


def test_step_inside_paused_is_refused_and_changes_nothing():
    run, other = Run(accumulate=1), Run(accumulate=1)
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(64))
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        with pytest.raises(UsageError, match="inside learner.paused"), run.learner.paused():
            run.learner.step(loss)
        run.learner.step(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        other.step()
    assert rewards_of(run)[1:] == rewards_of(other)[1:]


def test_evaluation_between_steps_leaves_no_trace():
    plain, evaluating = Run(accumulate=1), Run(accumulate=1)
    for _ in range(4):
        plain.step()
        evaluating.step()
        evaluating.model.eval()
        evaluating.model(torch.randn(9, 16))
        evaluating.model.train()
    assert torch.equal(plain.policy.scores, evaluating.policy.scores)


def test_draws_are_dropped_with_their_batch_also_if_nothing_is_recorded():
    run = Run(reward="nslr", accumulate=1).train(2)
    run.learner.sample(64)
    F.cross_entropy(run.model(torch.randn(64, 16)), torch.randint(4, (64,))).backward()
    run.optimizer.zero_grad()
    assert int(run.train(2).reports[-1].rewards.count_K.sum()) == 64


def test_a_micro_batch_whose_gradient_is_zero_is_not_given_up():
    run = Run(net=nn.Sequential(nn.Linear(16, 4)))
    for weight in (0.0, 1.0):
        x, y = run.mixture.draw(run.learner.sample(8))
        (weight * F.cross_entropy(run.model(x), y)).backward()
    assert run.learner.num_announced == 2


@pytest.mark.parametrize("call", ["sample", "skip"])
def test_a_pause_refuses_what_would_change_the_step(call):
    run = Run().train(1)
    with run.learner.paused(), pytest.raises(UsageError, match=r"inside learner\.paused\(\)"):
        run.learner.sample(4) if call == "sample" else run.learner.skip()
    assert run.train(2).reports[-1].rewarded


def test_a_learner_that_is_closed_in_a_pause_stays_closed():
    run = Run().train(1)
    run.learner.sample(4)
    with run.learner.paused():
        run.learner.close()
    F.cross_entropy(run.model(torch.randn(4, 16)), torch.randint(4, (4,))).backward()
    assert not run.model[0]._forward_hooks
