"""The derivative of an optimizer's step, against finite differences of the real optimizer in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy, Recording
from inloop.errors import UsageError
from inloop.optimizers import StepDerivative
from inloop.rewards import GradientAlignment

N = 12

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-2),
    "dampened": lambda p: torch.optim.SGD(groups(p), lr=0.02, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.001, maximize=True),
    "groups": lambda p: torch.optim.SGD(groups(p), lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=1e-2),
    "adamw groups": lambda p: torch.optim.AdamW(groups(p), lr=3e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3, dtype=torch.float64), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3, weight_decay=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=3e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=3e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=3e-2, lr_decay=1e-3),
}


def groups(parameters):
    """Two groups, the second with another learning rate and, where there is one, no dampening."""
    parameters = list(parameters)
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.005, "dampening": 0.0}]


class Task:
    """A small network that learns a fixed function; each example has a weight in the loss of its step."""

    def __init__(self, make, eps=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.optimizer = make(self.model.parameters())
        for group in self.optimizer.param_groups:
            group.update({"eps": eps} if eps is not None and "eps" in group else {})
        self.truth = nn.Linear(5, 3).double().requires_grad_(False)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self):
        x = torch.randn(N, 5, generator=self.generator, dtype=torch.float64)
        return x, self.truth(x).sin() + 0.3 * torch.randn(N, 3, generator=self.generator, dtype=torch.float64)

    @staticmethod
    def losses(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(dim=1)

    def step(self, batch, weights=None, model=None, optimizer=None):
        model, optimizer = model or self.model, optimizer or self.optimizer
        losses = self.losses(model, batch)
        optimizer.zero_grad()
        (losses.mean() if weights is None else (losses * weights).mean()).backward()
        optimizer.step()

    def train(self, steps):
        for _ in range(steps):
            self.step(self.batch())
        return self

    def copy(self):
        """The model and its optimizer, with its state, on parameters of their own."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return model, optimizer

    def truth_by_differences(self, batch, reference, h=1e-5):
        """``-dL_ref/dw_i`` of the step that the real optimizer takes."""

        def loss(i, change):
            weights = torch.ones(N, dtype=torch.float64)
            weights[i] += change
            model, optimizer = self.copy()
            self.step(batch, weights, model, optimizer)
            return float(self.losses(model, reference).mean().detach())

        return torch.tensor([-(loss(i, h) - loss(i, -h)) / (2 * h) for i in range(N)], dtype=torch.float64)

    def rewards(self, batch, reference, second_moment):
        derivative = StepDerivative(self.model, self.optimizer, second_moment)
        derivative.attach()
        names = [name for name, _ in self.model.named_parameters()]
        parameters = list(self.model.parameters())
        examples = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in self.losses(self.model, batch)]
        self.step(batch)
        gradients = torch.autograd.grad(self.losses(self.model, reference).mean(), parameters)
        directions = derivative.of_last_step(dict(zip(names, gradients, strict=True))).values()
        derivative.detach()
        return torch.stack(
            [sum((g * d).sum() for g, d in zip(example, directions, strict=True)) for example in examples]
        )


def correlation(first, second):
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("second_moment", ["fixed", "moving"])
def test_rewards_are_the_derivative_of_the_step_that_was_taken(name, second_moment):
    task = Task(OPTIMIZERS[name]).train(200)
    batch, reference = task.batch(), task.batch()
    expected = task.truth_by_differences(batch, reference)
    rewards = task.rewards(batch, reference, second_moment)
    assert correlation(rewards, expected) > (0.999 if second_moment == "moving" else 0.99)
    if second_moment == "moving" or "sgd" in name:  # the factor is 1 / N: the loss is a mean
        torch.testing.assert_close(rewards / N, expected, rtol=2e-3, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step(name):
    """With a large ε the derivative is no rounding error: Adam's first update is nearly the sign of the gradient."""
    task = Task(OPTIMIZERS[name], eps=1e-2)
    batch, reference = task.batch(), task.batch()
    expected = task.truth_by_differences(batch, reference)
    assert correlation(task.rewards(batch, reference, "moving"), expected) > 0.999


# ------------------------------------------------------------------ in a learner


class Kept(GradientAlignment):
    """Aligns once, as its parent does, and keeps the rewards."""

    aligns_once = True

    def __init__(self):
        self.rewards = []

    def __call__(self, step, judge):
        self.rewards.append(super().__call__(step, judge))
        return self.rewards[-1]


def expected_rewards(name, steps, second_moment="fixed"):
    """By one backward pass for each example, one optimizer step after the other."""
    task = Task(OPTIMIZERS[name])
    batches = [task.batch() for _ in range(steps + 1)]
    return [task.rewards(batches[t], batches[t + 1], second_moment) for t in range(steps)], task


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("name", ["groups", "dampened", "adamw", "adamw fused", "rmsprop centered"])
def test_a_learner_rewards_the_steps_of_its_optimizer(name, retain, part):
    expected, _ = expected_rewards(name, steps=6)
    task, reward = Task(OPTIMIZERS[name]), Kept()
    options = {"reward": reward, "update": False, "part": part, "record": Recording(retain=retain)}
    learner = InLoop(task.model, MixturePolicy(2), optimizer=task.optimizer, **options)
    rows = []
    for _ in range(7):
        learner.sample(N)
        task.optimizer.zero_grad()
        loss = task.losses(task.model, task.batch()).mean()
        loss.backward()
        rows.append(learner._sampler.announced[0].rewarded_here)
        learner.step(loss)
        task.optimizer.step()
    for rewards, whole, some in zip(reward.rewards, expected, rows[:-1], strict=True):
        torch.testing.assert_close(rewards, whole if some is None else whole[some], rtol=1e-9, atol=1e-15)
    assert (part == 1) == all(some is None for some in rows)


def one_step(learner, model, optimizer):
    learner.sample(8)
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    report = learner.step(loss)
    optimizer.step()
    optimizer.zero_grad()
    return report


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_derivative_serves_one_learner_after_another():
    model, optimizer = small()
    derivative = StepDerivative(model, optimizer)
    for _ in range(2):
        with InLoop(model, MixturePolicy(2), optimizer=derivative) as learner:
            assert [one_step(learner, model, optimizer).rewarded for _ in range(3)] == [False, True, True]
            with pytest.raises(UsageError, match="belongs to another learner already"):
                InLoop(model, MixturePolicy(2), optimizer=derivative)


def test_a_resumed_run_has_the_rewards_of_the_run_that_went_on_with_a_scheduler():
    """The reference "previous" asks for the optimizer's next step: its present settings count, not those of the last step."""

    def run(resume):
        model, optimizer = small()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        generator = torch.Generator().manual_seed(0)
        learner = InLoop(model, MixturePolicy(2), optimizer=optimizer, reference="previous", generator=generator)
        reports = []
        for step in range(6):
            if step == 3:
                state = learner.state_dict()
                if resume:
                    learner.close()
                    learner = InLoop(
                        model, MixturePolicy(2), optimizer=optimizer, reference="previous", generator=generator
                    )
                    learner.load_state_dict(state)
            reports.append(one_step(learner, model, optimizer).reward_std)
            scheduler.step()
        return reports[1:]

    assert run(resume=True) == run(resume=False)


@pytest.mark.parametrize("retain", ["exact", "recompute"])
def test_a_parameter_that_no_optimizer_holds_is_named(retain):
    model, _ = small()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    learner = InLoop(model, MixturePolicy(2), optimizer=optimizer, record=Recording(retain=retain))
    for _ in range(3):
        one_step(learner, model, optimizer)
    model[2].requires_grad_(True)
    with pytest.raises(UsageError, match="Parameter '2.weight' has a gradient, but no optimizer"):
        for _ in range(3):
            one_step(learner, model, optimizer)


def test_states_of_other_optimizers_are_refused():
    model, optimizer = small()
    learner, plain = InLoop(model, MixturePolicy(2), optimizer=optimizer), InLoop(model, MixturePolicy(2))
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    both = InLoop(model, MixturePolicy(2), optimizer=halves)
    with pytest.raises(UsageError, match=r"with optimizer=, which this one has not"):
        plain.load_state_dict(learner.state_dict())
    with pytest.raises(UsageError, match=r"with 1 optimizer\(s\); this one has 2"):
        both.load_state_dict(learner.state_dict())


def test_a_refused_learner_leaves_no_hook_on_the_optimizer():
    model, optimizer = small()
    with pytest.raises(UsageError, match="NextStepLoss makes no use"):
        InLoop(model, MixturePolicy(2), optimizer=optimizer, reward="nslr", reference="trail")
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("reference", ["next", "trail"])
def test_a_learner_s_step_that_comes_after_the_optimizer_s_is_refused(reference):
    model, optimizer = small()
    learner = InLoop(model, MixturePolicy(2), optimizer=optimizer, reference=reference)
    learner.sample(8)
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    with pytest.raises(UsageError, match="between loss.backward\\(\\) and optimizer.step\\(\\)"):
        learner.step(loss)


def test_the_learner_says_what_it_is_made_of():
    model, optimizer = small()
    learner = InLoop(model, MixturePolicy(2), optimizer=optimizer)
    assert "GradientAlignment, Next, Anchored with AdamW: 0 steps, 0 updates" in repr(learner)


def test_a_state_of_another_reference_is_refused():
    model, _ = small()
    state = InLoop(model, MixturePolicy(2)).state_dict()
    with pytest.raises(UsageError, match="with the reference Next; this one has Trail"):
        InLoop(model, MixturePolicy(2), reference="trail").load_state_dict(state)


def test_the_last_step_has_its_own_settings_and_the_next_the_present_ones():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    derivative = StepDerivative(model, optimizer)
    derivative.attach()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125  # as a scheduler does
    direction = torch.ones(1, 2)
    assert torch.equal(derivative.of_last_step({"weight": direction})["weight"], 0.5 * direction)
    assert torch.equal(derivative.of_next_step({"weight": direction})["weight"], 0.125 * direction)
    optimizer.load_state_dict(optimizer.state_dict())  # makes new groups
    optimizer.param_groups[0]["lr"] = 0.25
    assert torch.equal(derivative.of_next_step({"weight": direction})["weight"], 0.25 * direction)
    derivative.detach()
