"""Small models with what other people's architectures do: each was wrong, or refused unfairly, in a model of a public library."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import capture
from inloop.errors import UnsupportedLayerError, VerificationError
from tests.alignment.test_inputs import N, assert_exact, token_losses

V, D = 7, 6


pytestmark = pytest.mark.usefixtures("double_precision")


def losses_of(ids):
    return lambda model: token_losses(model(ids), ids)


class OwnPositions(nn.Embedding):
    """Takes the ids and looks up their positions, which all examples share (BART, BioGPT)."""

    def forward(self, ids):
        return super().forward(torch.arange(ids.shape[1]).unsqueeze(0))


class WithOwnPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.positions, self.head = nn.Embedding(V, D), OwnPositions(N, D), nn.Linear(D, V)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids) + self.positions(ids)))


@pytest.mark.parametrize("length", [4, N])
def test_a_layer_that_takes_the_data_and_returns_what_all_share(length):
    assert_exact(WithOwnPositions(), losses_of(torch.randint(V, (N, length))))


class TypeOfInput(nn.Module):
    """One row of a table, expanded to the shape of the data and used twice (BridgeTower)."""

    def __init__(self):
        super().__init__()
        self.table, self.types = nn.Embedding(V, D), nn.Embedding(2, D)
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids):
        x = self.table(ids)
        kind = self.types(torch.zeros(1, dtype=torch.long)).expand_as(x)
        return self.head(torch.tanh(self.layer(x + kind)) + kind)


def test_a_row_of_a_table_that_is_expanded_to_the_data():
    assert_exact(TypeOfInput(), losses_of(torch.randint(V, (N, 4))))


class ThirdAxis(nn.Module):
    """Distances between boxes, with the examples on the third axis (BROS)."""

    def __init__(self):
        super().__init__()
        self.boxes, self.layer, self.head = nn.Embedding(V, 2), nn.Linear(2, D), nn.Linear(D, V)

    def forward(self, ids):
        x = self.boxes(ids).transpose(0, 1)  # [T, N, 2]
        apart = self.layer(x[None] - x[:, None] ** 2)  # [T, T, N, D]
        return self.head(torch.tanh(apart).sum(dim=0)).transpose(0, 1)


@pytest.mark.parametrize("length", [4, N])
def test_examples_on_the_third_axis(length):
    assert_exact(ThirdAxis(), losses_of(torch.randint(V, (N, length))))


class Cache:
    """Keeps keys, as a language model does to generate."""

    def __init__(self):
        self.keys = []

    def update(self, layer, key):
        if len(self.keys) == layer:
            self.keys.append(torch.zeros(len(key), 0, D))
        self.keys[layer] = torch.cat([self.keys[layer], key], dim=1)
        return self.keys[layer]


class OwnAttention(nn.Module):
    """Attention with a parameter of its own, which is run again as a whole, and a cache that it changes (DiffLlama, Doge)."""

    def __init__(self, number):
        super().__init__()
        self.number, self.q, self.k, self.scale = number, nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.rand(D))

    def forward(self, x, cache=None):
        key = cache.update(self.number, self.k(x))
        return F.scaled_dot_product_attention(self.q(x) * self.scale, key, key)


class CachedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList([OwnAttention(0), OwnAttention(1)])

    def forward(self, ids):
        x, cache = self.table(ids), Cache()
        for layer in self.layers:
            x = x + layer(x, cache=cache)
        return self.head(x)


@pytest.mark.parametrize("retain", ["exact", "recompute"])
def test_a_cache_that_a_module_to_run_again_changes(retain):
    ids = torch.randint(V, (N, 4))
    assert_exact(CachedModel(), losses_of(ids))
    model = CachedModel()
    with capture(model, retain=retain):
        token_losses(model(ids), ids).mean().backward()


class Cancels(nn.Module):
    """Its bias has no influence, as that of a key in attention; the gradient is rounding (CaiT, XCiT, DETR)."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return self.gain * x + (x + self.bias).tanh() - (x.flip(1) + self.bias).tanh().flip(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_cancels_inside_of_a_module_to_run_again(dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, D), Cancels(), nn.Linear(D, 3)).to(dtype)
        with capture(model):
            model(torch.randn(N, 50, 4, dtype=dtype)).square().mean().backward()


def test_what_does_not_cancel_is_not_excused():
    """A part of a gradient that no example accounts for is found, however small the gradient is beside the others."""
    model = nn.Sequential(nn.Linear(4, D), Cancels(), nn.Linear(D, 3))
    with pytest.raises(VerificationError, match="1.bias"), capture(model):
        loss = model(torch.randn(N, 50, 4)).square().mean()
        (loss + 1e-5 * loss.detach() * model[1].bias.sum()).backward()


def test_a_complex_parameter_without_a_layer_is_refused_by_name():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.phase = nn.Linear(4, 4), nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x):
            return (self.layer(x) * self.phase).abs().sum(1)

    model = Complex()
    with pytest.raises(UnsupportedLayerError, match="parameter 'phase': it is complex"), capture(model):
        model(torch.randn(N, 4)).sum().backward()


def test_a_nested_tensor_is_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(UnsupportedLayerError, match="nested tensor.*padded"), capture(model):
        model(ragged).values().sum().backward()
