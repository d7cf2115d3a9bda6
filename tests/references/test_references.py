"""What a step is judged by: the step before it, or a loss on held-out data, with what is refused of either."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop import refusals
from inloop.alignment.oracles import align_by_loss
from inloop.errors import UsageError
from tests.training import Run, make_net, make_sources, rewards_of


def test_previous_rewards_at_once_with_the_gradient_before():
    run = Run(net=make_net().double(), sources=[(x.double(), y) for x, y in make_sources()], reference="previous")
    gradients, expected = None, []
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(8))
        losses_N = F.cross_entropy(run.model(x), y, reduction="none")
        losses_N.mean().backward(retain_graph=True)
        run.learner.step(losses_N.mean())
        if gradients is not None:
            expected.append(float(align_by_loss(run.model, losses_N, gradients).mean()))
        gradients = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert [report.rewarded for report in run.reports] == [False, True, True]
    assert rewards_of(run)[1:] == pytest.approx(expected, rel=1e-9)


def test_interleaving_with_the_previous_gradient_never_rewards_plain_steps():
    run = Run(reference="previous", interleave=True, accumulate=1).train(6)
    assert [report.rewarded for report in run.reports] == [False, False, True, False, True, False]


# ------------------------------------------------------------------ held-out data


def test_a_held_out_reference_is_evaluated_after_the_step():
    held_out_x, held_out_y = make_sources(seed=1)[0]
    net = make_net()
    calls = []

    def held_out_loss():
        calls.append(copy.deepcopy(net))
        return F.cross_entropy(net(held_out_x), held_out_y)

    run = Run(net=net, reference=held_out_loss)
    x, y = run.mixture.draw(run.learner.sample(16))
    before = copy.deepcopy(net)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    run.learner.step(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    after = copy.deepcopy(net)
    run.step()
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(calls[0].parameters(), after.parameters(), strict=True))
    g = torch.autograd.grad(F.cross_entropy(after(held_out_x), held_out_y), list(after.parameters()))
    direction = dict(zip(dict(after.named_parameters()), g, strict=True))
    rewards_N = align_by_loss(before, F.cross_entropy(before(x), y, reduction="none"), direction)
    assert rewards_of(run)[1] == pytest.approx(float(rewards_N.mean()), rel=1e-4)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_held_out_loss_that_comes_after_the_optimizers_step_is_warned_of(optimizer_first, caplog):
    refusals.warn_once.cache_clear()
    held_out_x, held_out_y = make_sources(seed=1)[0]
    net = make_net()
    run = Run(net=net, reference=lambda: F.cross_entropy(net(held_out_x), held_out_y))
    for _ in range(3):
        x, y = run.mixture.draw(run.learner.sample(16))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if optimizer_first:
            run.optimizer.step()
        run.learner.step(loss)
        if not optimizer_first:
            run.optimizer.step()
        run.optimizer.zero_grad()
    assert ("before optimizer.step()" in caplog.text) == optimizer_first
    refusals.warn_once.cache_clear()


def test_a_reference_function_that_calls_backward_is_refused():
    def held_out_loss():
        loss = run.model(torch.randn(8, 16)).square().mean()
        loss.backward()
        return loss

    run = Run(reference=held_out_loss)
    with pytest.raises(UsageError, match="has called backward on its loss"):
        run.train(3)


@pytest.mark.parametrize(
    ("held_out_loss", "got"),
    [
        (lambda: 1.0, "float"),
        (lambda: None, "NoneType"),
        (lambda: torch.zeros(3, requires_grad=True) + 0, r"a tensor of shape \(3,\)"),
        (lambda: torch.tensor(1.0), r"a tensor of shape \(\)"),
    ],
)
def test_a_reference_function_that_returns_no_loss(held_out_loss, got):
    run = Run(reference=held_out_loss).train(1)
    with pytest.raises(UsageError, match=f"returned {got}. It must take no argument and return a scalar loss"):
        run.step()


def test_a_held_out_reference_restores_buffers_that_it_has_changed_and_writes_no_others():
    """A write raises the version of a tensor, which spoils the graphs and tapes that have read it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head, self.places = nn.BatchNorm1d(16), nn.Linear(16, 4), nn.Embedding(16, 1)
            self.register_buffer("ids", torch.arange(16))

        def forward(self, x):
            return self.head(self.norm(x) + self.places(self.ids).squeeze(1))

    held_out_x, held_out_y = make_sources(seed=1)[0]
    net, during = Net(), []

    def held_out_loss():
        loss = F.cross_entropy(net(held_out_x), held_out_y)
        during.append(net.norm.running_mean.clone())
        return loss

    run = Run(net=net, reference=held_out_loss)
    version, plain = net.ids._version, Run(net=copy.deepcopy(net))
    run.train(4)
    plain.train(4)
    assert [report.rewarded for report in run.reports] == [False, True, True, True]
    assert len(during) == 3
    assert net.ids._version == version
    assert not torch.equal(during[-1], net.norm.running_mean)
    assert torch.equal(net.norm.running_mean, plain.model.norm.running_mean)
    assert net.norm.num_batches_tracked == 4


def test_a_held_out_loss_of_another_model_is_refused():
    model, other, x = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.randn(4, 3)
    learner = inloop.InLoop(model, inloop.MixturePolicy(2), reference=lambda: other(x).square().mean())

    def step():
        learner.sample(4)
        loss = model(x).square().mean()
        loss.backward()
        learner.step(loss)
        model.zero_grad()

    step()
    with pytest.raises(UsageError, match="does not depend on the learner's model"):
        step()
