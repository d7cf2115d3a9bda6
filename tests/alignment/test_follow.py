"""Parameters that no layer accounts for: exact where they meet the data, or an error that names them, also without ``verify``."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from inloop import InloopError, capture
from inloop.alignment.operation import Recipe
from inloop.alignment.oracles import align_by_loss
from inloop.errors import BatchSizeError
from tests.alignment.architectures import D, Model, N, T, UnseenProduct
from tests.alignment.exactness import (
    assert_exact,
    per_example_losses,
    random_direction,
    x,
)

# ------------------------------------------------------------------ followed to the data


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5))

    def forward(self, batch):
        return batch * self.gain


class SharedGain(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.other, self.head = nn.Parameter(torch.randn(5)), Holder(), nn.Linear(5, 40)

    def forward(self, batch):
        return self.head(self.other(batch) + self.positions * self.other.gain)


def test_parameters_that_are_left_out_are_as_they_were():
    """Though the optimizer changes them in place before the reward is known."""
    torch.manual_seed(0)
    model = SharedGain().double()
    direction = random_direction(model) | {"other.gain": None}
    with capture(model, layers=lambda name, module: name != "other", reduction="sum") as tape:
        losses_N = model(x(5)).square().sum(dim=1)
        losses_N.sum().backward(retain_graph=True)
    oracle_N = align_by_loss(model, losses_N, direction)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(tape.align(direction), oracle_N)


class Positions(nn.Module):
    """The usual transformer start, with the positions looked up once for all examples or once for each."""

    def __init__(self, length, shared):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(length, 4)
        self.head = nn.Linear(4, 3)
        self.shared = shared

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        return self.head(
            torch.tanh(self.tokens(ids) + self.positions(positions if self.shared else positions.expand_as(ids)))
        )

    def embed(self, ids, positions):
        """The positions are given, and cannot be distinguished from data."""
        return self.head(torch.tanh(self.tokens(ids) + self.positions(positions)))


@pytest.mark.parametrize("length", [T, N])
def test_positions_shared_by_all_examples(length):
    """Also where there are as many positions as examples, which no count of rows can tell."""
    ids = torch.randint(0, 9, (N, length))
    assert_exact(Positions(length, shared=False).double(), ids)
    assert_exact(Positions(length, shared=True).double(), ids)
    model = Positions(length, shared=True).double()
    with pytest.raises(BatchSizeError, match=r"positions.expand\(N, -1\)"), capture(model):
        model.embed(ids, torch.arange(length)).square().sum().backward()


pytestmark = pytest.mark.usefixtures("double_precision")


def linear(*sizes):
    return nn.Linear(*sizes)


def normalized_in_place(m, x):
    with torch.no_grad():
        m.weight.copy_(F.normalize(m.weight, dim=0))
    return m.head(m.first(x) @ m.weight)


def written_through_a_view(m, x):
    both = torch.zeros(len(x), 2, D)
    both[:, 0].copy_(m.first(x))
    both[:, 1].copy_(x)
    return m.head(torch.tanh(both))


def calls_itself(m, x, depth=2):
    return torch.tanh(m.first(m(x, depth - 1) if depth else x)) * m.gain


EXACT = {
    "a parameter normalised in place": Model(
        normalized_in_place, first=linear(D, D), weight=torch.randn(D, D), head=linear(D, 90)
    ),
    "data written through a view": Model(written_through_a_view, first=linear(D, D), head=linear(D, 3)),
    "a model that calls itself": Model(calls_itself, first=linear(D, D), gain=torch.randn(D)),
}


@pytest.mark.parametrize("case", EXACT)
def test_unusual_uses_that_are_exact(case):
    assert_exact(EXACT[case].double(), torch.randn(N, D))


def test_attention_by_function_with_bare_weights():
    def forward(m, x):
        x = x.transpose(0, 1)
        out, weights = F.multi_head_attention_forward(
            x, x, x, D, 2, m.inward, None, None, None, False, 0.0, m.outward, None, average_attn_weights=False
        )
        return m.head(torch.cat([out.transpose(0, 1).flatten(1), weights.flatten(1)], dim=1))

    parts = {"inward": torch.randn(3 * D, D), "outward": torch.randn(D, D)}
    assert_exact(Model(forward, head=linear(T * D + 2 * T * T, 90), **parts), torch.randn(N, T, D))


def test_complex_activations():
    def forward(m, x):
        spectrum = torch.fft.rfft(m.first(x), dim=1) * m.gain
        return m.head(torch.fft.irfft(spectrum, n=x.shape[1], dim=1))

    model = Model(forward, first=linear(D, D), gain=torch.randn(T // 2 + 1, D), head=linear(D, 30))
    assert_exact(model, torch.randn(N, T, D))


# ------------------------------------------------------------------ uses that cannot be seen


UNSEEN = {
    "a custom autograd function": Model(
        lambda m, x: m.head(UnseenProduct.apply(m.first(x), m.gain)),
        first=linear(D, D),
        gain=torch.randn(D),
        head=linear(D, 9),
    ),
    "vmap": Model(
        lambda m, x: torch.vmap(lambda row: torch.tanh(row @ m.weight))(m.first(x)),
        first=linear(D, 20),
        weight=torch.randn(20, D),
    ),
    "a layer under vmap": Model(lambda m, x: m.head(torch.vmap(m.first)(x)), first=linear(D, D), head=linear(D, 3)),
    "written through a view of a constant": Model(
        lambda m, x: m.head(m.first(x) @ _diagonal(m.diagonal) + x),
        first=linear(D, D),
        diagonal=torch.randn(D),
        head=linear(D, 9),
    ),
    "a reentrant checkpoint": Model(
        lambda m, x: m.head(checkpoint(lambda h: torch.tanh(h) * m.gain, m.first(x), use_reentrant=True)),
        first=linear(D, D),
        gain=torch.randn(D),
        head=linear(D, 9),
    ),
}


def _diagonal(values):
    weight = torch.zeros(D, D)
    weight.diagonal().copy_(values.exp())
    return weight


@pytest.mark.parametrize("retain", ["exact", "recompute"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("case", UNSEEN)
def test_uses_that_cannot_be_seen_are_named(case, verify, retain):
    model = UNSEEN[case].double()
    model.zero_grad()
    with pytest.raises(InloopError, match="recorded|meets the data"):
        with capture(model, verify=verify, retain=retain) as tape:
            per_example_losses(model(torch.randn(N, D))).mean().backward()
        tape.align(random_direction(model))


def test_a_parameter_in_the_loss_is_named():
    model = Model(lambda m, x: m.first(x), first=linear(D, D), scale=torch.randn(()))
    with pytest.raises(InloopError, match="'scale'"):
        with capture(model) as tape:
            (per_example_losses(model(torch.randn(N, D))) * model.scale.exp()).mean().backward()
        tape.align(random_direction(model))


def test_a_method_other_than_forward_is_named():
    class Encoder(Model):
        def encode(self, x):
            return self.head(self.first(x) * self.gain)

    model = Encoder(None, first=linear(D, D), gain=torch.randn(D), head=linear(D, 9))
    with pytest.raises(InloopError, match="'gain'"):
        with capture(model) as tape:
            per_example_losses(model.encode(torch.randn(N, D))).mean().backward()
        tape.align(random_direction(model))


def test_a_layer_called_with_other_parameters_is_refused_by_name():
    def forward(m, x):
        return functional_call(m.layer, {name: 2 * value for name, value in m.layer.named_parameters()}, (x,))

    model = Model(forward, layer=linear(D, 3))
    with pytest.raises(InloopError, match=r"'layer' \(Linear\).*functional_call"), capture(model):
        model(torch.randn(N, D))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, D))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_by_name(make):
    model = nn.Sequential(make(nn.Sequential(linear(D, D), nn.Tanh())), linear(D, 3))
    with pytest.raises(InloopError, match="TorchScript"), capture(model):
        pass


class Magnitude(nn.Module):
    """As in DoRA: owns a parameter, and is given the layers that it scales."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x, *, down, up, base):
        columns = up(down(torch.eye(5, dtype=x.dtype))).T.detach()
        norm = (base.weight + columns).norm(dim=1)
        return (self.weight / norm) * (base(x) + up(down(x)))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 6).requires_grad_(False)
        self.down, self.up, self.magnitude = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False), Magnitude()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.magnitude(x, down=self.down, up=self.up, base=self.base).tanh())


def test_a_layer_that_is_given_others(caplog):
    assert_exact(Adapted().double(), torch.randn(4, 5, dtype=torch.float64))
    assert not caplog.text


class ResidualsBeforeTheData(nn.Module):
    """Queries that every example shares pass through residual operations before they meet the data."""

    def __init__(self, depth):
        super().__init__()
        self.depth, self.queries, self.head = depth, nn.Parameter(torch.rand(D)), nn.Linear(D, 3)

    def forward(self, batch):
        queries = self.queries
        for _ in range(self.depth):
            queries = queries + queries.tanh() / self.depth
        return self.head(batch * queries)


def test_residuals_of_what_all_examples_share_do_not_double_the_work(monkeypatch):
    run, count = Recipe._run, 0

    def counting(recipe, args, kwargs):
        nonlocal count
        count += 1
        return run(recipe, args, kwargs)

    monkeypatch.setattr(Recipe, "_run", counting)
    counts = []
    for depth in (4, 8):
        count = 0
        assert_exact(ResidualsBeforeTheData(depth), torch.randn(N, D))
        counts.append(count)
    assert counts[1] < 2.5 * counts[0]


def test_there_may_be_any_number_of_operations_before_the_data():
    assert_exact(ResidualsBeforeTheData(300), torch.randn(N, D))
