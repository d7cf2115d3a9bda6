"""What is kept of a step: exactly, in half the memory, or nothing but the batch and the parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inloop
from inloop.alignment import rules
from inloop.alignment.kept import Half, Halves
from inloop.errors import BatchSizeError, UnsupportedLayerError, UsageError
from tests.alignment.exactness import assert_exact, per_example_losses, relative_error, rewards_and_oracle


class Residual(nn.Module):
    """An in-place activation on the very first output, dropout, a layer that is used twice."""

    def __init__(self, norm=lambda channels: nn.GroupNorm(2, channels)):
        super().__init__()
        self.stem, self.norm, self.conv = nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        x = x + self.conv(F.dropout(F.relu(self.norm(x)), 0.3, self.training))
        x = x + self.conv(x)
        return self.head(x.mean(dim=(2, 3)))


class Tokens(nn.Module):
    """Two embeddings that nothing comes before, a black box, a tied output layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(7).expand(len(ids), 7))
        return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


MODELS = {
    "residual": lambda: (Residual(), torch.randn(5, 3, 8, 8).double()),
    "tokens": lambda: (Tokens(), torch.randint(0, 11, (5, 7))),
    "one layer": lambda: (nn.Linear(3, 2), torch.randn(5, 3).double()),
    "black box": lambda: (nn.GRUCell(3, 4), torch.randn(5, 3).double()),
    "sequential": lambda: (
        nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 2)),
        torch.randn(6, 3).double(),
    ),
}


def make(name):
    torch.manual_seed(3)
    model, x = MODELS[name]()
    return model.double(), x


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_rewards_are_exact(name, reduction):
    model, x = make(name)
    assert_exact(model, x, retain="recompute", reduction=reduction)


@pytest.mark.parametrize("layers", [None, ["conv", "head"]])
@pytest.mark.parametrize("affine", [False, True])
def test_recomputing_with_batchnorm_equals_what_was_kept(layers, affine):
    torch.manual_seed(3)
    model, x = Residual(nn.BatchNorm2d).double(), torch.randn(5, 3, 8, 8).double()
    direction = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    rewards = {}
    for retain in ("exact", "recompute"):
        torch.manual_seed(5)
        twin = copy.deepcopy(model)
        with inloop.capture(twin, layers=layers, retain=retain, batchnorm_affine=affine, verify=True) as tape:
            per_example_losses(twin(x)).mean().backward()
        rewards[retain] = tape.align(direction)
    assert relative_error(rewards["recompute"], rewards["exact"]) < 1e-12


def test_recomputing_leaves_the_model_and_the_random_state_alone():
    model, x = Residual(nn.BatchNorm2d), torch.randn(5, 3, 8, 8)
    with inloop.capture(model, retain="recompute") as tape:
        per_example_losses(model(x)).mean().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    tape.align(gradients)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def replayed_batches(tape, direction):
    """How many examples the first layer sees in each replay."""
    sizes = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: sizes.append(len(out)) if isinstance(module, nn.Linear) else None
    )
    tape.align(direction)
    handle.remove()
    return sizes


class Masked(nn.Module):
    """Its second argument is no batch, though it may have as many rows."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 4), nn.Dropout(dropout)

    def forward(self, x, mask):
        return torch.einsum("st,ntd->nsd", mask, self.dropout(self.linear(x)))


@pytest.mark.parametrize(
    ("positions", "dropout", "expected"), [(5, 0.0, [1, 3, 3, 3, 1]), (10, 0.0, [10]), (5, 0.5, [10])]
)
def test_examples_are_recomputed_in_parts_where_that_is_the_same(positions, dropout, expected):
    torch.manual_seed(1)
    model = Masked(dropout).double()
    x, mask = torch.randn(10, positions, 3).double(), torch.rand(positions, positions).double()
    assert_exact(model, x, mask, retain="recompute")
    model.zero_grad()
    with inloop.capture(model, retain="recompute") as tape:
        per_example_losses(model(x, mask)).mean().backward()
    sizes = replayed_batches(tape, {name: parameter.grad for name, parameter in model.named_parameters()})
    if positions == 10:
        sizes = [size for size in sizes if size != 1]  # the attempt with one example
    assert sizes == expected


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * torch.sigmoid(self.gate)


def test_a_rule_that_reads_the_parameters_is_kept_in_half_too(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @inloop.alignment_rule(Gate, parameters=("gate",), keeps_parameters=True)
    def align(call, direction):
        share = torch.sigmoid(call.layer.gate)
        return call.dot(call.args[0] * share * (1 - share) * direction["gate"])

    model, x = Gate(), torch.randn(6, 5)
    with inloop.capture(model, retain="half") as tape:
        model(x).square().mean().backward()
    (call,) = tape.calls
    assert isinstance(call.dout, Half)
    assert isinstance(call.args[0], Half)


def test_one_copy_of_the_parameters_at_a_time():
    """The copy for step t+1 is made when that for step t is not needed any more."""
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    learner = inloop.InLoop(model, inloop.MixturePolicy(2), record=inloop.Recording(retain="recompute"))
    for _ in range(2):
        learner.sample(4)
        loss = model(torch.randn(4, 50)).square().mean()
        loss.backward()
        (call,) = learner._recorder.tape.calls
        assert call.layer[0].weight.data_ptr() == model[0].weight.data_ptr()
        learner.step(loss)
        (call,) = learner.reference.waiting.tape.calls
        assert call.layer[0].weight.data_ptr() != model[0].weight.data_ptr()
        model.zero_grad()


def test_recomputing_computes_no_gradients_of_weights_but_the_first():
    """They would be a third of the backward pass."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    with inloop.capture(model, retain="recompute") as tape:
        model(torch.randn(4, 3)).square().mean().backward()
    direction = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.profiler.profile(record_shapes=True) as profile:
        tape.align(direction)
    products = [tuple(map(tuple, event.input_shapes[:2])) for event in profile.events() if event.name == "aten::mm"]
    assert ((5, 1), (1, 3)) in products  # the first layer's, of an example at a time
    assert ((5, 1), (1, 5)) not in products
    assert ((2, 1), (1, 5)) not in products


def test_recomputing_checks_that_every_layer_sees_the_examples():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(6, 3), nn.Linear(3, 2)

        def forward(self, x, ids):
            return self.head(x + self.table(ids).mean(dim=0))

    model = Shared()
    with inloop.capture(model, retain="recompute") as tape:
        model(torch.randn(4, 3), torch.arange(6)).square().mean().backward()
    with pytest.raises(BatchSizeError, match="'table' saw 6 rows"):
        tape.align({name: parameter.grad for name, parameter in model.named_parameters()})


def test_a_model_that_returns_its_loss_cannot_be_recomputed():
    class WithLoss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = nn.Sequential(WithLoss(3, 2))
    with inloop.capture(model, retain="recompute") as tape:
        model(torch.randn(4, 3)).backward()
    with pytest.raises(UnsupportedLayerError, match="returned a scalar"):
        tape.align({name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("name", [name for name in MODELS if name != "black box"])
def test_half_precision_loses_little(name):
    """2**-11 of a number; of a reward, which is a sum of many, less than a hundredth."""
    model, x = make(name)
    rewards_N, oracle_N = rewards_and_oracle(model, x, retain="half")
    assert 0 < relative_error(rewards_N, oracle_N) < 1e-2


def test_half_precision_keeps_gradients_of_any_size():
    """float16 alone has nothing below 6e-8."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(5, 4).double()
    for factor in (1e-30, 1.0, 1e30):
        with inloop.capture(model, reduction="sum", retain="half") as tape:
            (model(x).square().sum() * factor).backward()
        with inloop.capture(model, reduction="sum") as exact:
            (model(x).square().sum() * factor).backward()
        direction = {"0.weight": torch.randn(3, 4).double()}
        assert relative_error(tape.align(direction), exact.align(direction)) < 1e-2


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5, 7), (1, 3_000_000)])
def test_a_half_is_close_and_takes_half_of_float32(shape):
    tensor = torch.randn(shape)
    half = Half.of(tensor)
    assert half.full().dtype == torch.float32
    assert half.shape == tensor.shape
    assert half.nbytes == tensor.nbytes
    assert half.values.nbytes == tensor.nbytes // 2
    close = tensor.abs() * 2.0**-11 + 2.0**-25 * (tensor.abs().max() if tensor.numel() else 0)
    assert bool(((half.full() - tensor).abs() <= close).all())


def test_zeros_and_infinities_survive_as_halves():
    assert torch.equal(Half.of(torch.zeros(3)).full(), torch.zeros(3))
    assert not bool(Half.of(torch.tensor([1.0, float("inf")])).full().isfinite().all())
    assert not bool(Half.of(torch.tensor([1.0, float("nan")])).full().isfinite().all())


def test_what_layers_share_is_halved_once():
    halves, shared = Halves(), torch.randn(4, 3)
    assert halves(shared) is halves(shared.detach())
    assert halves(shared) is not halves(shared[:2])
    before = halves(shared)
    shared.mul_(2)
    assert halves(shared) is not before
    whole = torch.arange(3)
    assert halves(whole) is whole


def test_a_freed_tensor_is_not_taken_for_its_successor():
    halves = Halves()
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        assert float(halves(tensor).full()[0]) == value


def test_unknown_retention():
    with (
        pytest.raises(UsageError, match="retain='quarter': allowed are 'exact'"),
        inloop.capture(nn.Linear(2, 2), retain="quarter"),
    ):
        pass
