"""Modules without a rule: exact through the fallback, or refused by name; never wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from inloop import capture
from inloop.alignment import black_box as black_box_module
from inloop.errors import UnsupportedLayerError
from tests.alignment.exactness import assert_exact, relative_error, rewards_and_oracle, rule_names

N = 4


def x(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


class UsesOutput(nn.Module):
    """A recurrent layer whose outputs and final states all reach the loss."""

    def __init__(self, recurrent):
        super().__init__()
        self.recurrent = recurrent

    def forward(self, batch):
        out, state = self.recurrent(batch)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([out.flatten(1), *[s.transpose(0, 1).flatten(1) for s in states]], dim=1)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("recurrent", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(recurrent, options):
    assert_exact(UsesOutput(recurrent(3, 5, batch_first=True, **options)).double(), x(6, 3))


def test_lstm_with_projection():
    assert_exact(UsesOutput(nn.LSTM(3, 5, proj_size=2, batch_first=True)).double(), x(6, 3))


def test_dropout_inside_a_black_box_is_replayed():
    assert_exact(UsesOutput(nn.LSTM(3, 5, num_layers=3, dropout=0.5, batch_first=True)).double(), x(6, 3))
    assert_exact(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.4, batch_first=True).double(), x(5, 6))


def test_replaying_leaves_the_random_state_alone():
    model = nn.LSTM(3, 5, num_layers=3, dropout=0.5, batch_first=True)
    with capture(model) as tape:
        model(torch.randn(N, 6, 3))[0].mean().backward()
    before = torch.get_rng_state()
    tape.align({name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(torch.get_rng_state(), before)


def test_recurrent_layer_in_float32_with_its_fused_kernel():
    rewards_N, oracle_N = rewards_and_oracle(UsesOutput(nn.LSTM(3, 5, batch_first=True)), torch.randn(N, 6, 3))
    assert relative_error(rewards_N, oracle_N) < 1e-5


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, query, key_value):
        out, weights = self.attention(query, key_value, key_value)
        return torch.cat([out.flatten(1), weights.flatten(1)], dim=1)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 4, "vdim": 4}, {"add_bias_kv": True}], ids=str)
def test_multihead_attention_with_its_output_projection(options):
    model = Attends(**options).double()
    assert rule_names(model) == {"attention": "run again"}  # out_proj is never called as a module
    assert_exact(model, x(5, 6), x(3, options.get("kdim", 6)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layers(norm_first):
    assert_exact(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=norm_first).double().eval(), x(5, 6))
    decoder = nn.TransformerDecoderLayer(6, 2, 8, dropout=0.1, batch_first=True, norm_first=norm_first).double()
    assert_exact(decoder, x(5, 6), x(3, 6))


@pytest.mark.parametrize(
    "reparametrize",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")),
        nn.utils.spectral_norm,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_reparametrized_layers_are_exact_through_the_fallback(reparametrize, bias):
    """weight_norm keeps Linear's forward, so the type alone would say that the rule applies."""
    layer = reparametrize(nn.Linear(5, 4, bias=bias).double())
    assert rule_names(layer) == {"": "run again"}
    assert_exact(layer, x(5))
    convolution = reparametrize(nn.Conv2d(2, 3, 3, bias=bias).double())
    assert_exact(convolution, x(2, 5, 5))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.shift = nn.Parameter(torch.rand(5))

    def forward(self, batch):
        return batch * self.scale.exp() + self.shift


class ReLULinear(nn.Linear):
    def forward(self, batch):
        return F.relu(super().forward(batch)) ** 2


class StandardizedConv(nn.Conv2d):
    """Keeps forward and overrides what forward calls."""

    def _conv_forward(self, batch, weight, bias):
        return super()._conv_forward(batch, (weight - weight.mean()) / weight.std(), bias)


class ExtraParameter(nn.Linear):
    def __init__(self):
        super().__init__(5, 3)
        self.unused_by_the_rule = nn.Parameter(torch.rand(3))


class HoldsAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.ParameterList([torch.rand(5), torch.rand(5)])

    def forward(self, batch):
        return (batch * self.gates[0]).sigmoid() * self.gates[1]


class StopsGradients(nn.Module):
    """Forward mode would see through no_grad; what counts is the gradient of training."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5, 5))

    def forward(self, batch):
        with torch.no_grad():
            size = self.weight.norm()
        return batch @ (self.weight / size + self.weight.detach().exp())


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, batch, weight):
        ctx.save_for_backward(batch, weight)
        return batch @ weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        batch, weight = ctx.saved_tensors
        return dout @ weight.T, batch.transpose(-1, -2) @ dout


class _HidesItsBackward(_OnceDifferentiable):
    @staticmethod
    def backward(ctx, dout):
        batch, weight = ctx.saved_tensors
        with torch.no_grad():
            return dout @ weight.T, batch.transpose(-1, -2) @ dout.detach()


class CustomFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(5, 3))
        self.power = nn.Parameter(torch.tensor(1.3))

    def forward(self, batch):
        return self.function.apply(batch, self.weight) * self.power


class KeywordsAndDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, *, values, scale, mode="square"):
        assert mode == "square"
        return {"a": (values["x"] * self.weight) ** 2, "b": (scale * self.weight.sin()).sum(dim=1)}


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Scale(), (5,)),
        (ReLULinear(5, 3), (5,)),
        (StandardizedConv(2, 3, 3), (2, 5, 5)),
        (ExtraParameter(), (5,)),
        (HoldsAList(), (5,)),
        (StopsGradients(), (5,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_users_modules(module, shape):
    assert rule_names(module) == {"": "run again"}
    if isinstance(module, ExtraParameter):
        module.unused_by_the_rule.requires_grad_(False)
    assert_exact(module.double(), x(*shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [_OnceDifferentiable, _HidesItsBackward])
def test_functions_without_a_second_derivative_take_one_backward_an_example(function, dtype, monkeypatch):
    calls = []
    original = black_box_module._one_backward_per_example
    monkeypatch.setattr(black_box_module, "_one_backward_per_example", lambda *a: calls.append(1) or original(*a))
    rewards_N, oracle_N = rewards_and_oracle(CustomFunction(function).to(dtype), x(5).to(dtype))
    assert relative_error(rewards_N, oracle_N) < (1e-9 if dtype == torch.float64 else 3e-2)
    assert calls


def test_keyword_inputs_and_dict_outputs():
    values, scale = {"x": x(5)}, x(5)

    def forward(model):
        outputs = model(values=values, scale=scale, mode="square")
        return torch.cat([outputs["a"], outputs["b"].unsqueeze(1)], dim=1)

    assert_exact(KeywordsAndDicts().double(), forward=forward)


class SharesWithItsParent(nn.Module):
    """A layer that is used both inside a black box and outside of it."""

    class Inner(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.scale = nn.Parameter(torch.rand(5))

        def forward(self, batch):
            return torch.tanh(self.layer(batch)) * self.scale

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.inner = self.Inner(self.layer)

    def forward(self, batch):
        return self.inner(self.layer(batch))


class TwoOutputs(nn.Module):
    """Outputs that depend on each other; ``used`` says which reach the loss."""

    def __init__(self, used):
        super().__init__()
        self.used = used
        self.box = self.Box()

    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.rand(5, 4)), nn.Parameter(torch.rand(4, 3))

        def forward(self, batch):
            hidden = torch.tanh(batch @ self.first)
            out = hidden @ self.second
            return {"out": out, "hidden": hidden, "again": out}

    def forward(self, batch):
        outputs = self.box(batch)
        return torch.cat([outputs[name] for name in self.used], dim=1)


@pytest.mark.parametrize("used", [["out"], ["hidden"], ["out", "hidden"], ["out", "again", "hidden"]], ids=str)
def test_outputs_that_depend_on_each_other(used):
    model = TwoOutputs(used).double()
    if "out" not in used:
        model.box.second.requires_grad_(False)
    assert_exact(model, x(5))


def test_recurrent_cells():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(5, 3)

        def forward(self, batch):
            state = self.cell(batch)
            state = self.cell(batch, state)
            return torch.cat(state, dim=1)

    assert_exact(Cell().double(), x(5))


def test_a_layer_shared_between_a_black_box_and_its_parent():
    assert_exact(SharesWithItsParent().double(), x(5))


def test_parameters_held_by_parts_that_are_never_called():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"gates": nn.ParameterList([torch.rand(5)]), "layer": nn.Linear(5, 5)})

        def forward(self, batch):
            return self.parts["layer"](batch) * self.parts["gates"][0]

    assert_exact(Holds().double(), x(5))


def test_pruned_layers():
    from torch.nn.utils import prune

    assert_exact(prune.l1_unstructured(nn.Linear(5, 4).double(), "weight", amount=0.4), x(5))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_is_no_parameter(name):
    layer = nn.Linear(5, 4).double()
    value = getattr(layer, name).detach().clone()
    delattr(layer, name)
    layer.register_buffer(name, value)
    assert_exact(layer, x(5))


def test_attention_whose_key_bias_has_no_gradient():
    """In exact arithmetic it is zero, so what is there is rounding, and must not look like an omission."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, batch):
            return F.scaled_dot_product_attention(self.query(batch), self.key(batch), self.value(batch))

    assert_exact(Attention().double(), x(5, 6))
    assert_exact(nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3)).double(), x(2, 6, 6))
    rewards_and_oracle(Attention(), torch.randn(N, 5, 6))


class ChangesItsInput(Scale):
    def forward(self, batch):
        batch += 1
        return super().forward(batch)


class CountsCalls(Scale):
    calls = 0

    def forward(self, batch):
        CountsCalls.calls += 1
        return super().forward(batch) * CountsCalls.calls


class ReturnsAnObject(Scale):
    def forward(self, batch):
        return type("Result", (), {"value": super().forward(batch)})()


class AddsALoss(Scale):
    def forward(self, batch):
        return super().forward(batch).sum()


@pytest.mark.parametrize(
    ("module", "forward", "message"),
    [
        (ChangesItsInput(), lambda m: m(torch.ones(4, 5)), "changes its input in place"),
        (CountsCalls(), lambda m: m(torch.ones(4, 5)), "gives another output when it is run again"),
        (ReturnsAnObject(), lambda m: m(torch.ones(4, 5)).value, "returned a Result"),
        (AddsALoss(), lambda m: m(torch.ones(4, 5)), "returned a scalar that reaches the loss"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_replayed_or_told_apart_is_refused_by_name(module, forward, message):
    with pytest.raises(UnsupportedLayerError, match=message):
        with capture(module) as tape:
            forward(module).sum().backward()
        tape.align({name: torch.ones_like(p) for name, p in module.named_parameters()})


def test_a_black_box_that_raises_leaves_nothing_behind():
    class Fails(Scale):
        fail = True

        def forward(self, batch):
            if self.fail:
                raise ValueError("mine")
            return super().forward(batch)

    model = Fails().double()
    with capture(model, verify=True) as tape:
        with pytest.raises(ValueError, match="mine"):
            model(x(5))
        assert tape.running == {}
        model.fail = False
        model(x(5)).square().mean().backward()
    assert len(tape.calls) == 1


def test_a_module_that_calls_itself_is_refused_by_name():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, batch, depth=2):
            return self(batch * self.scale, depth - 1) if depth else batch * self.scale

    model = Recursive()
    with pytest.raises(UnsupportedLayerError, match="calls itself"), capture(model):
        model(torch.randn(2, 5))


class Gated(nn.Module):
    """Its own parameter enters the output only if there is a second input."""

    def __init__(self):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)

    def forward(self, x, more=None):
        return x * 2 if more is None else x * self.weight + self.layer(more)


def test_a_module_whose_parameters_do_not_enter_its_output():
    first, gated = nn.Linear(3, 3).double(), Gated().double()
    assert_exact(nn.Sequential(first, gated), x(3))


class ReturnsItsBias(nn.Module):
    """As in GPT-NeoX-Japanese: the caller adds the bias."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.layer(x), self.bias


class AddsTheBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = ReturnsItsBias()

    def forward(self, x):
        out, bias = self.first(x)
        return (out + bias).tanh()


def test_a_parameter_among_the_outputs():
    assert_exact(AddsTheBias().double(), x(3))


class Masks(nn.Module):
    """Its scores of what is masked are -inf, and do not enter the loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.cat([x * self.weight, torch.full_like(x, -torch.inf)], dim=1)


def test_an_output_with_infinities():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.masks, self.last = Masks(), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.masks(x)[:, :3])

    assert_exact(Model().double(), x(3))
