"""A step is aligned while the next gradient is being formed, so that its tape need not wait until the end of it."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment import gradients_of
from inloop.alignment.capture import Recording, make_recorder
from inloop.alignment.early import EarlyAlignment
from inloop.errors import UsageError
from inloop.rewards import GradientAlignment
from tests.learners import make_learner
from tests.training import watch_input

pytestmark = pytest.mark.usefixtures("nothing_is_small")


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    return model.double()


def batch(n=6):
    return torch.randn(n, 1, 4, 4).double(), torch.randint(0, 3, (n,))


class Loop:
    """A training loop; ``change`` may do something to the gradients between backward and ``learner.step``."""

    def __init__(self, change=lambda loop: None, passes=1, **options):
        self.model = make_model()
        self.learner = make_learner(self.model, inloop.MixturePolicy(2), accumulate=1, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.change, self.passes, self.reports = change, passes, []

    def backward(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        for _ in range(self.passes - 1):
            (loss / self.passes).backward(retain_graph=True)
        (loss / self.passes).backward()
        return loss

    def step(self):
        actions = self.learner.sample(6)
        loss = self.backward(*batch(len(actions)))
        self.change(self)
        self.reports.append(self.learner.step(loss))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps):
        torch.manual_seed(7)
        for _ in range(steps):
            self.step()
        return self


def rewards(loop):
    return [report.reward_mean for report in loop.reports if report.rewarded]


def late(monkeypatch, **options):
    """The same run, in which a step is aligned only when learner.step is called."""
    with monkeypatch.context() as patch:
        patch.setattr(EarlyAlignment, "begin", lambda self, *_: None)
        return Loop(**options).train(6)


@pytest.mark.parametrize("retain", ["exact", "half", "recompute"])
def test_early_and_late_alignment_are_the_same(retain, monkeypatch):
    early = Loop(retain=retain).train(6)
    assert len(rewards(early)) == 5
    assert rewards(early) == pytest.approx(rewards(late(monkeypatch, retain=retain)), rel=1e-12)


def test_interleaved_steps_are_aligned_early_too(monkeypatch):
    early = Loop(interleave=True).train(6)
    assert len(rewards(early)) == 3
    assert rewards(early) == pytest.approx(rewards(late(monkeypatch, interleave=True)), rel=1e-12)


def test_the_tape_shrinks_during_the_backward_pass():
    loop = Loop().train(3)
    tape, sizes = loop.learner.reference.waiting.tape, []
    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: sizes.append(len(tape.calls)))
    loop.learner.sample(6)
    loop.backward(*batch())
    assert sizes[0] > 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_inputs_are_released_once_their_layer_is_done():
    """In half precision the tape has copies; the originals go with the graph, though the loss is still there."""
    for retain in ("exact", "half"):
        loop = Loop(retain=retain).train(3)
        loop.learner.sample(6)
        is_held = watch_input(loop.model[5])
        loss = loop.backward(*batch())
        assert loss.grad_fn is not None
        assert is_held() == (retain == "exact")


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3),
        lambda loop: loop.backward(*batch()),
        lambda loop: setattr(loop.model[0].weight, "grad", loop.model[0].weight.grad * 2),
        lambda loop: setattr(loop.model[5].bias, "grad", None),
    ],
    ids=["clipped", "another pass", "replaced", "removed"],
)
def test_gradients_that_change_after_the_backward_pass_are_noticed(change, caplog):
    loop = Loop(verify=False).train(3)
    loop.change = change
    with caplog.at_level(logging.WARNING):
        loop.step()
    assert not loop.reports[-1].rewarded
    assert "the gradients changed after the step's first backward pass" in loop.reports[-1].dropped
    assert caplog.text.count("from now on they are kept until learner.step") == 1
    loop.step()
    assert loop.reports[-1].dropped is None


def test_several_passes_from_the_start_cost_no_rewards(monkeypatch):
    twice = Loop(passes=2).train(6)
    assert [report.rewarded for report in twice.reports] == [False] + [True] * 5
    assert rewards(twice) == pytest.approx(rewards(late(monkeypatch, passes=2)), rel=1e-12)


def test_a_second_pass_through_the_same_graph_is_noticed():
    loop = Loop().train(3)
    loop.passes = 2
    loop.step()
    assert not loop.reports[-1].rewarded
    assert "kept until learner.step" in loop.reports[-1].dropped
    loop.train(3)
    assert [report.rewarded for report in loop.reports[-3:]] == [False, True, True]


def test_skipping_after_a_backward_pass_loses_the_step_before_and_no_more():
    loop = Loop().train(3)
    loop.learner.sample(6)
    loop.backward(*batch())
    loop.optimizer.zero_grad()
    loop.learner.skip()
    loop.train(2)
    assert [report.rewarded for report in loop.reports[-2:]] == [False, True]


def test_passes_in_a_pause_align_nothing():
    loop = Loop().train(2)
    with loop.learner.paused():
        loop.backward(*batch())
        loop.optimizer.zero_grad()
    loop.step()
    assert loop.reports[-1].rewarded


def test_the_state_between_backward_and_step_has_no_half_rewarded_step():
    loop = Loop().train(3)
    loop.learner.sample(6)
    loop.backward(*batch())
    loop.learner.state_dict()
    assert loop.learner.reference.waiting is None


def early_for(tape):
    early = EarlyAlignment(allowed=True)
    early.state = "on"
    early.begin(tape)
    return early


def test_a_parameter_without_gradient_counts_as_zero():
    """A layer that the judging step does not use waits for a gradient that never comes."""
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}).double()
    recorder = make_recorder(model, Recording())
    x = torch.randn(4, 3).double()
    tape = recorder.start("sum")
    (model["a"](x) + model["b"](x)).square().sum().backward()
    recorder.stop()
    whole = recorder.start("sum")
    (model["a"](x) + model["b"](x)).square().sum().backward()
    recorder.stop()
    model.zero_grad()
    recorder.early = early_for(tape)
    model["a"](x).square().sum().backward()
    assert len(tape.calls) == 1
    assert torch.allclose(tape.align(gradients_of(model)), whole.align(gradients_of(model)))
    recorder.remove()


def test_a_tape_that_was_begun_accepts_no_other_direction():
    model = nn.Linear(3, 2)
    recorder = make_recorder(model, Recording())
    tape = recorder.start("sum")
    model(torch.randn(4, 3)).sum().backward()
    recorder.stop()
    model.zero_grad()
    recorder.early = early_for(tape)
    model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(UsageError, match="aligned with other gradients already"):
        tape.align({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    recorder.remove()


class SignOfAlignment(GradientAlignment):
    """Says nothing of aligning once."""

    def __call__(self, step, judge):
        return super().__call__(step, judge).sign()


def test_a_reward_opts_in_by_itself():
    for reward, early in (("gar", True), (SignOfAlignment(), False)):
        loop = Loop(reward=reward).train(3)
        waiting = loop.learner.reference.waiting.tape
        loop.learner.sample(6)
        loop.backward(*batch())
        assert (waiting.calls == []) == early
