"""Algorithm 1: against finite differences, against the closed form, both remedies and both computations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.errors import UsageError
from inloop.metagradient import MetaGradient

N = 6
SGD_OPTIONS = [
    {"lr": 0.3},
    {"lr": 0.2, "momentum": 0.9},
    {"lr": 0.2, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    {"lr": 0.2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    {"lr": 0.2, "momentum": 0.8, "maximize": True},
]


class Weights(nn.Module):
    """A weight for each training example."""

    def __init__(self, n=N):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=torch.float64))

    def forward(self, losses_N):
        return (self.weight * losses_N).mean()


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, logits):
        return logits / self.log_temperature.exp()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(num_batches, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(N, 4, dtype=torch.float64, generator=generator), torch.randint(0, 3, (N,), generator=generator))
        for _ in range(num_batches)
    ]


def weighted_loss(model, x, y, meta):
    losses_N = F.cross_entropy(model(x), y, reduction="none")
    return losses_N.mean() if meta is None else meta(losses_N)


class KeepsGradients(torch.optim.SGD):
    """A meta-optimizer that records what it is given and does not move, so that each step can be examined."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.seen = []

    def step(self):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])


def run(model, meta, optimizer, steps, computation, remedy="stop-gradient", loss=weighted_loss):
    learner = MetaGradient(
        model,
        meta,
        optimizer,
        meta_optimizer=KeepsGradients(meta.parameters()),
        computation=computation,
        remedy=remedy,
    )
    for x, y in steps:
        learner.step(lambda phi, x=x, y=y: loss(model, x, y, phi))
        optimizer.step()
        optimizer.zero_grad()
    return learner.meta_optimizer.seen


def finite_difference(loss_after, meta, epsilon=1e-6):
    """Central differences of a function of φ, one coordinate at a time."""
    (parameter,) = meta.parameters()
    flat = parameter.data.view(-1)
    derivatives = []
    for i in range(len(flat)):
        values = []
        for sign in (1, -1):
            flat[i] += sign * epsilon
            values.append(loss_after())
            flat[i] -= sign * epsilon
        derivatives.append((values[0] - values[1]) / (2 * epsilon))
    return torch.tensor(derivatives, dtype=torch.float64).view(parameter.shape)


@pytest.mark.parametrize("computation", ["reuse", "unroll"])
@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
@pytest.mark.parametrize("warm_up", [0, 2])
def test_the_meta_gradient_equals_finite_differences_of_the_next_loss(computation, options, warm_up):
    """Through the SGD update as torch makes it, on its first step and with a momentum buffer that is already there."""
    steps = batches(warm_up + 2)
    model, meta = make_net(), Weights()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    got = run(model, meta, optimizer, steps, computation)[-1][0]

    model, phi = make_net(), Weights()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for x, y in steps[:warm_up]:
        weighted_loss(model, x, y, Weights()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def next_loss():
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        weighted_loss(model, *steps[-2], phi).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return float(weighted_loss(model, *steps[-1], Weights()))  # φ_t is held: the stop-gradient

    torch.testing.assert_close(got, finite_difference(next_loss, phi), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("computation", ["reuse", "unroll"])
def test_the_gradient_of_example_weights_is_minus_alpha_r_over_n(computation):
    """L_t = 1/N sum w_i l_i at w = 1 and plain SGD: dL(θ_{t+1})/dw_i = -α r_i / N, the link to the reward."""
    alpha, steps = 0.3, batches(2)
    model, meta = make_net(), Weights()
    got = run(model, meta, torch.optim.SGD(model.parameters(), lr=alpha), steps, computation)[0][0]

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=alpha)
    (x, y), (x_next, y_next) = steps
    with capture(model) as tape:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(x_next), y_next).backward()
    rewards_N = tape.align({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(got, -alpha * rewards_N / N, rtol=1e-10, atol=1e-14)


def tempered_loss(model, x, y, meta):
    logits = model(x)
    return F.cross_entropy(logits if meta is None else meta(logits), y)


@pytest.mark.parametrize("remedy", ["stop-gradient", "phi-free"])
@pytest.mark.parametrize(("loss", "make_meta"), [(weighted_loss, Weights), (tempered_loss, Temperature)])
def test_both_computations_agree_over_a_run(remedy, loss, make_meta):
    runs = []
    for computation in ("reuse", "unroll"):
        model, meta = make_net(), make_meta()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        runs.append(run(model, meta, optimizer, batches(7), computation, remedy, loss))
    assert len(runs[0]) == {"stop-gradient": 6, "phi-free": 3}[remedy]
    for first, second in zip(*runs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


def test_phi_free_steps_receive_none_and_are_not_paid():
    model, meta = make_net(), Weights()
    learner = MetaGradient(model, meta, torch.optim.SGD(model.parameters(), lr=0.1), remedy="phi-free")
    received = []
    for x, y in batches(4):
        learner.step(lambda phi, x=x, y=y: (received.append(phi is None), weighted_loss(model, x, y, phi))[1])
        learner.optimizer.step()
        learner.optimizer.zero_grad()
    assert received == [False, True, False, True]


def test_the_stop_gradient_leaves_the_direct_term_out():
    """With a φ that only makes a step's own loss smaller, there is nothing to learn."""

    class Bonus(nn.Module):
        def __init__(self):
            super().__init__()
            self.bonus = nn.Parameter(torch.zeros((), dtype=torch.float64))

    model, meta = make_net(), Bonus()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = run(
        model,
        meta,
        optimizer,
        batches(3),
        "unroll",
        loss=lambda m, x, y, phi: F.cross_entropy(m(x), y) * (1 + 0 * phi.bonus) - phi.bonus,
    )
    assert all(float(gradient.abs()) < 1e-12 for (gradient,) in losses)


def test_gradients_are_those_of_backward():
    """MetaGradient.step stands in for loss.backward(): same .grad, same loss, same buffers, and it adds up."""
    x, y = batches(1)[0]
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    reference, meta = copy.deepcopy(model), Weights()
    learner = MetaGradient(model, meta, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = learner.step(lambda phi: weighted_loss(model, x, y, phi))
    expected = weighted_loss(reference, x, y, meta)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_unrolling_repeats_dropout_and_moves_statistics_once():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    results = []
    for computation in ("reuse", "unroll"):
        model, meta = make(), Weights()
        torch.manual_seed(7)
        gradients = run(model, meta, torch.optim.SGD(model.parameters(), lr=0.2), batches(4), computation)
        results.append((gradients, model.state_dict()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)


def test_example_weights_learn_to_ignore_wrong_labels():
    torch.manual_seed(0)
    x = torch.randn(120, 4, dtype=torch.float64)
    y = (x @ torch.randn(4, 3, dtype=torch.float64)).argmax(1)
    wrong = torch.arange(120) < 24
    y = torch.where(wrong, (y + 1) % 3, y)
    model, meta = make_net(), Weights(120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = MetaGradient(model, meta, optimizer, meta_optimizer=torch.optim.Adam(meta.parameters(), lr=0.02))
    for _ in range(150):
        learner.step(lambda phi: phi(F.cross_entropy(model(x), y, reduction="none")))
        optimizer.step()
        optimizer.zero_grad()
    assert meta.weight[wrong].mean() < meta.weight[~wrong].mean() - 0.3


def test_bad_use_is_named():
    model, meta = make_net(), Weights()
    with pytest.raises(UsageError, match="optimizer is Adam.*Fix: use SGD"):
        MetaGradient(model, meta, torch.optim.Adam(model.parameters()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="remedy='none': allowed are 'stop-gradient' and 'phi-free'"):
        MetaGradient(model, meta, sgd, remedy="none")
    with pytest.raises(UsageError, match="computation='fast': allowed are 'reuse' and 'unroll'"):
        MetaGradient(model, meta, sgd, computation="fast")
    x, y = batches(1)[0]
    with pytest.raises(UsageError, match="does not depend on the meta-parameters"):
        MetaGradient(model, meta, sgd).step(lambda phi: F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match=r"tensor of shape \(6,\); a scalar with its graph is needed"):
        MetaGradient(model, meta, sgd).step(lambda phi: F.cross_entropy(model(x), y, reduction="none"))
    assert all(p.grad is None for p in model.parameters())


def test_arguments_of_the_wrong_kind_are_named():
    model, sgd = make_net(), torch.optim.SGD(make_net().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="holds no parameter of the model"):
        MetaGradient(model, Weights(), sgd)
    with pytest.raises(UsageError, match="meta is a Parameter"):
        MetaGradient(model, nn.Parameter(torch.ones(2)), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_update_that_is_not_plain_sgd_is_noticed():
    model, meta = make_net(), Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = MetaGradient(model, meta, optimizer)
    (x, y), _ = batches(2)
    learner.step(lambda phi: weighted_loss(model, x, y, phi))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="did not move by the SGD step.*without clipping"):
        learner.step(lambda phi: weighted_loss(model, x, y, phi))


@pytest.mark.parametrize("remedy", ["stop-gradient", "phi-free"])
def test_a_continued_run_equals_the_uninterrupted_one(remedy):
    def start():
        model, meta = make_net(), Weights()
        return MetaGradient(model, meta, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), remedy=remedy)

    def train(learner, steps):
        for x, y in steps:
            learner.step(lambda phi, x=x, y=y: weighted_loss(learner.model, x, y, phi))
            learner.optimizer.step()
            learner.optimizer.zero_grad()

    steps = batches(9)
    first = start()
    train(first, steps[:5])
    saved = copy.deepcopy((first.state_dict(), first.model.state_dict(), first.optimizer.state_dict()))
    train(first, steps[5:])
    second = start()
    train(second, steps[:2])
    second.load_state_dict(saved[0])
    second.model.load_state_dict(saved[1])
    second.optimizer.load_state_dict(saved[2])
    train(second, steps[5:])
    assert torch.equal(first.meta.weight, second.meta.weight)
    assert not torch.equal(first.meta.weight, torch.ones(N, dtype=torch.float64))


def test_a_meta_gradient_that_is_not_finite_is_dropped(caplog):
    model, meta = make_net(), Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = MetaGradient(model, meta, optimizer)
    (x, y), (x_next, y_next) = batches(2)
    learner.step(lambda phi: weighted_loss(model, x, y, phi))
    optimizer.step()
    optimizer.zero_grad()
    learner.step(lambda phi: weighted_loss(model, x_next, y_next, phi) * float("inf"))
    assert "not finite" in caplog.text
    assert torch.equal(meta.weight, torch.ones(N, dtype=torch.float64))
