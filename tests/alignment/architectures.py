"""Small architectures with whatever people do in them. Each is a module and its inputs, examples on the first axis of the output.

Axes: N examples, T positions, D features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

N, T, D = 5, 4, 6
ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {}


def architecture(
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]],
) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    ARCHITECTURES[make.__name__.strip("_").replace("_", " ")] = make
    return make


class Model(nn.Module):
    """Parts by name, and a function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
        self._function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


class UnseenProduct(torch.autograd.Function):
    """What no torch function shows."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dout):
        x, w = ctx.saved_tensors
        return dout * w, (dout * x).sum(0)


def rows() -> Tensor:
    return torch.randn(N, D)


def sequences() -> Tensor:
    return torch.randn(N, T, D)


def images() -> Tensor:
    return torch.randn(N, 3, 8, 8)


def tokens() -> Tensor:
    return torch.randint(9, (N, T))


# ------------------------------------------------------------------ parameters used more than once, or without their module


@architecture
def tied_autoencoder():
    return Model(lambda m, x: F.linear(torch.tanh(m.code(x)), m.code.weight.T), code=nn.Linear(D, 3)), (rows(),)


@architecture
def tied_embedding_and_head():
    model = nn.Sequential(nn.Embedding(9, D), nn.Tanh(), nn.Linear(D, 9, bias=False))
    model[2].weight = model[0].weight
    return model, (tokens(),)


@architecture
def head_is_the_transposed_embedding():
    return Model(lambda m, ids: torch.tanh(m.table(ids)) @ m.table.weight.T, table=nn.Embedding(9, D)), (tokens(),)


@architecture
def layer_called_three_times():
    return Model(lambda m, x: m.step(torch.tanh(m.step(torch.tanh(m.step(x))))), step=nn.Linear(D, D)), (rows(),)


@architecture
def siamese_towers():
    tower = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3))
    return Model(lambda m, x, y: m.tower(x) * m.tower(y), tower=tower), (rows(), rows())


@architecture
def functional_linear():
    forward = lambda m, x: F.linear(torch.tanh(m.first(x)), m.second.weight, m.second.bias)  # noqa: E731
    return Model(forward, first=nn.Linear(D, D), second=nn.Linear(D, 3)), (rows(),)


@architecture
def functional_convolution_with_a_scaled_kernel():
    forward = lambda m, x: F.conv2d(m.stem(x), 0.5 * m.conv.weight, padding=1).mean((2, 3))  # noqa: E731
    return Model(forward, stem=nn.Conv2d(3, 4, 3), conv=nn.Conv2d(4, 2, 3)), (images(),)


@architecture
def standardized_kernel():
    def forward(m, x):
        w = m.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, w, m.conv.bias).flatten(1)

    return Model(forward, conv=nn.Conv2d(3, 2, 3), unused=nn.Linear(1, 1).requires_grad_(False)), (images(),)


# ------------------------------------------------------------------ bare parameters


@architecture
def vision_transformer():
    def forward(m, x):
        patches = m.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), -1, -1), patches], dim=1) + m.positions
        return m.head(m.block(x)[:, 0])

    block = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    parts = {"token": torch.randn(1, 1, D), "positions": torch.randn(1, 5, D)}
    return Model(forward, patches=nn.Conv2d(3, D, 4, 4), block=block, head=nn.Linear(D, 3), **parts), (images(),)


@architecture
def layer_scale_and_temperature():
    def forward(m, x):
        x = x + m.scale * torch.tanh(m.first(x))
        return m.head(x) / m.log_temperature.exp()

    parts = {"scale": torch.randn(D), "log_temperature": torch.randn(())}
    return Model(forward, first=nn.Linear(D, D), head=nn.Linear(D, 3), **parts), (sequences(),)


@architecture
def bare_parameter_around_batchnorm_in_eval():
    forward = lambda m, x: m.head(m.norm(x) * m.gain + m.shift)  # noqa: E731
    model = Model(
        forward,
        norm=nn.BatchNorm1d(D).requires_grad_(False),
        gain=torch.randn(D),
        shift=torch.randn(1, D),
        head=nn.Linear(D, 3),
    )
    model.norm.running_mean.normal_()
    return model.eval(), (rows(),)


@architecture
def noise_in_evaluation_too():
    def forward(m, x):
        mean, spread = m.encode(x).chunk(2, dim=1)
        return m.decode(mean + spread.exp() * torch.randn_like(mean))

    return Model(forward, encode=nn.Linear(D, 4), decode=nn.Linear(2, D)), (rows(),)


@architecture
def gates_in_a_list():
    forward = lambda m, x: m.head(x * m.gates[0].sigmoid() + m.gates[1])  # noqa: E731
    gates = nn.ParameterList([torch.randn(D), torch.randn(D)])
    return Model(forward, gates=gates, head=nn.Linear(D, 30)), (rows(),)


@architecture
def added_and_written_in_place():
    def forward(m, x):
        x = m.first(x)
        x += m.positions
        x[:, 0] = m.token
        x.mul_(m.gain)
        return m.head(x)

    parts = {"positions": torch.randn(T, D), "token": torch.randn(D), "gain": torch.randn(D)}
    return Model(forward, first=nn.Linear(D, D), head=nn.Linear(D, 3), **parts), (sequences(),)


@architecture
def written_into_a_fresh_tensor():
    def forward(m, x):
        both = torch.zeros(len(x), T + 1, D, dtype=x.dtype)
        both[:, 1:] = m.first(x)
        both[:, 0] = m.token
        return m.head(torch.tanh(both))

    return Model(forward, first=nn.Linear(D, D), token=torch.randn(D), head=nn.Linear(D, 3)), (sequences(),)


@architecture
def data_added_into_what_is_made_of_a_parameter():
    def forward(m, x):
        both = m.positions.expand(len(x), -1, -1).clone()
        both += m.first(x)
        return m.head(torch.tanh(both))

    return Model(forward, first=nn.Linear(D, D), positions=torch.randn(T, D), head=nn.Linear(D, 3)), (sequences(),)


@architecture
def largest_of_shifted_and_split_parameters():
    def forward(m, x):
        shift, scale = m.both.chunk(2)
        values, _ = (m.first(x) * scale).add(shift).max(dim=1)
        best, _ = torch.max(x + m.bias.T, dim=1)
        return m.head(torch.cat([values, best], dim=1))

    parts = {"both": torch.randn(2 * D), "bias": torch.randn(D, 1)}
    return Model(forward, first=nn.Linear(D, D), head=nn.Linear(2 * D, 9), **parts), (sequences(),)


@architecture
def dropout_on_positions():
    forward = lambda m, x: m.head(torch.tanh(m.first(x) + F.dropout(m.positions, 0.5)))  # noqa: E731
    return Model(forward, first=nn.Linear(D, D), head=nn.Linear(D, 3), positions=torch.randn(T, D)), (sequences(),)


@architecture
def prompt_through_a_layer():
    def forward(m, x):
        prompt = m.project(torch.tanh(m.prompt))
        return m.head(torch.cat([prompt.expand(len(x), -1, -1), m.first(x)], dim=1)).sum(1)

    return Model(
        forward, prompt=torch.randn(2, 3), project=nn.Linear(3, D), first=nn.Linear(D, D), head=nn.Linear(D, 9)
    ), (sequences(),)


@architecture
def learned_queries_attend_to_the_data():
    def forward(m, x):
        return m.head(m.attention(m.queries.expand(len(x), -1, -1), x, x)[0])

    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    return Model(forward, queries=torch.randn(2, D), attention=attention, head=nn.Linear(D, 50)), (sequences(),)


@architecture
def codebook_by_distance():
    def forward(m, x):
        z = m.encode(x)
        weights = torch.cdist(z.unsqueeze(1), m.codes.expand(len(x), -1, -1)).squeeze(1).neg().softmax(-1)
        return m.decode(weights @ m.codes)

    return Model(forward, encode=nn.Linear(D, 3), codes=torch.randn(4, 3), decode=nn.Linear(3, D)), (rows(),)


# ------------------------------------------------------------------ what all examples share


@architecture
def positions_of_shape_T():
    forward = lambda m, ids: m.head(torch.tanh(m.words(ids) + m.places(torch.arange(ids.shape[1]))))  # noqa: E731
    return Model(forward, words=nn.Embedding(9, D), places=nn.Embedding(T, D), head=nn.Linear(D, 3)), (tokens(),)


@architecture
def positions_of_shape_1_T():
    def forward(m, ids):
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        return m.head(m.norm(m.words(ids) + m.places(places)))

    return Model(
        forward, words=nn.Embedding(9, D), places=nn.Embedding(9, D), norm=nn.LayerNorm(D), head=nn.Linear(D, 3)
    ), (tokens(),)


@architecture
def positions_as_many_as_examples():
    forward = lambda m, ids: m.head(torch.tanh(m.words(ids) + m.places(torch.arange(ids.shape[1]))))  # noqa: E731
    parts = {"words": nn.Embedding(9, D), "places": nn.Embedding(N, D), "head": nn.Linear(D, 3)}
    return Model(forward, **parts), (torch.randint(9, (N, N)),)


@architecture
def relative_position_bias():
    def forward(m, x):
        distance = (torch.arange(T)[:, None] - torch.arange(T)[None]).clamp(-2, 2) + 2
        bias = m.bias(distance).permute(2, 0, 1).unsqueeze(0)
        q, k, v = m.qkv(x).view(len(x), T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return m.out(mixed.transpose(1, 2).flatten(2))

    return Model(forward, bias=nn.Embedding(5, 2), qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, 3)), (sequences(),)


# ------------------------------------------------------------------ sequences


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    def forward(m, x):
        first = options.get("batch_first", False)
        out, state = m.cells(x if first else x.transpose(0, 1))
        final = state[0] if isinstance(state, tuple) else state
        return m.head(out if first else out.transpose(0, 1)).sum(1) + final.sum((0, 2)).unsqueeze(1)

    width = 4 * (2 if options.get("bidirectional") else 1)
    return Model(forward, cells=kind(D, 4, **options), head=nn.Linear(width, 3)), (sequences(),)


ARCHITECTURES |= {
    "rnn, examples second": lambda: _recurrent(nn.RNN),
    "gru, examples second, bidirectional": lambda: _recurrent(nn.GRU, bidirectional=True),
    "lstm, examples second, dropout": lambda: _recurrent(nn.LSTM, num_layers=2, dropout=0.5),
    "lstm, examples first": lambda: _recurrent(nn.LSTM, batch_first=True),
}


@architecture
def packed_sequences():
    def forward(m, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (final, _) = m.cells(packed)
        padded, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return m.head(padded).sum(1) + final[-1].sum(1, keepdim=True)

    lengths = torch.tensor([2, 4, 1, 3, 4])
    return Model(forward, cells=nn.LSTM(D, 4, batch_first=True), head=nn.Linear(4, 3)), (sequences(), lengths)


@architecture
def padded_sequences_with_a_mask():
    def forward(m, x, keep):
        hidden = m.attention(m.first(x), m.first(x), x, key_padding_mask=~keep)[0]
        return m.head((hidden * keep.unsqueeze(2)).sum(1) / keep.sum(1, keepdim=True))

    keep = torch.arange(T) < torch.tensor([2, 4, 1, 3, 4]).unsqueeze(1)
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    return Model(forward, first=nn.Linear(D, D), attention=attention, head=nn.Linear(D, 3)), (sequences(), keep)


@architecture
def transformer_encoder_with_examples_second():
    layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.3)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(D), enable_nested_tensor=False)
    return Model(lambda m, x: m.encoder(x.transpose(0, 1)).mean(0), encoder=encoder), (sequences(),)


@architecture
def attention_with_examples_second():
    def forward(m, x):
        x = x.transpose(0, 1)
        out, weights = m.attention(x, x, x)
        return torch.cat([out.transpose(0, 1).flatten(1), weights.flatten(1)], dim=1)

    return Model(forward, attention=nn.MultiheadAttention(D, 2)), (sequences(),)


@architecture
def whole_transformer():
    model = nn.Transformer(D, 2, 1, 1, 8, dropout=0.2, batch_first=True)
    return model, (sequences(), torch.randn(N, 3, D))


@architecture
def gru_cells_in_a_loop():
    def forward(m, x):
        state = m.start.expand(len(x), -1)
        for t in range(T):
            state = m.cell(x[:, t], state)
        return m.head(state)

    return Model(forward, start=torch.randn(4), cell=nn.GRUCell(D, 4), head=nn.Linear(4, 60)), (sequences(),)


@architecture
def state_space_block():
    """A selective state space: decay, input and output depend on the data, and a bare matrix on the state."""

    def forward(m, x):
        u = F.silu(m.conv(m.enter(x).transpose(1, 2))[..., :T]).transpose(1, 2)
        step, b, c = F.softplus(m.step(u)), m.b(u), m.c(u)
        decay = torch.exp(step.unsqueeze(-1) * -m.log_a.exp())
        state, outputs = torch.zeros(len(x), D, 3), []
        for t in range(T):
            state = decay[:, t] * state + (step[:, t] * u[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        return m.leave(torch.stack(outputs, dim=1) + u * m.skip)

    parts = {"log_a": torch.randn(D, 3), "skip": torch.randn(D)}
    layers = {"step": nn.Linear(D, D), "b": nn.Linear(D, 3), "c": nn.Linear(D, 3), "leave": nn.Linear(D, 3)}
    conv = nn.Conv1d(D, D, 3, padding=2, groups=D)
    return Model(forward, enter=nn.Linear(D, D), conv=conv, **layers, **parts), (sequences(),)


@architecture
def mixture_of_experts():
    def forward(m, x):
        shares = m.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in m.experts], dim=-1).mul(shares.unsqueeze(1)).sum(-1)

    experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 4), nn.GELU(), nn.Linear(4, 3)) for _ in range(3))
    return Model(forward, gate=nn.Linear(D, 3), experts=experts), (rows(),)


# ------------------------------------------------------------------ examples elsewhere than on the first axis


@architecture
def positions_first_throughout():
    def forward(m, x):
        x = m.norm(m.dropout(torch.tanh(m.first(x.transpose(0, 1)))))
        return m.head(x).transpose(0, 1)

    parts = {"first": nn.Linear(D, D), "dropout": nn.Dropout(0.3), "norm": nn.LayerNorm(D), "head": nn.Linear(D, 3)}
    return Model(forward, **parts), (sequences(),)


@architecture
def positions_first_and_as_many_as_examples():
    def forward(m, x):
        x = m.second(torch.tanh(m.first(x.transpose(0, 1))))
        return m.head(x.mean(0))

    return Model(forward, first=nn.Linear(D, D), second=nn.Linear(D, D), head=nn.Linear(D, 3)), (torch.randn(N, N, D),)


def _positions_first_with_bare_positions(length: int) -> tuple[nn.Module, tuple[Any, ...]]:
    def forward(m, x):
        x = m.first(x.transpose(0, 1)) + m.positions
        return m.head(torch.tanh(x)).mean(0)

    parts = {"first": nn.Linear(D, D), "positions": torch.randn(length, 1, D), "head": nn.Linear(D, 3)}
    return Model(forward, **parts), (torch.randn(N, length, D),)


ARCHITECTURES |= {
    "bare positions, positions first": lambda: _positions_first_with_bare_positions(T),
    "bare positions, positions first and as many as examples": lambda: _positions_first_with_bare_positions(N),
}


@architecture
def learned_queries_with_examples_second():
    def forward(m, x):
        x = x.transpose(0, 1)
        queries = m.queries.unsqueeze(1).expand(-1, x.shape[1], -1)
        return m.head(m.attention(queries, x, x)[0]).transpose(0, 1)

    attention = nn.MultiheadAttention(D, 2)
    return Model(forward, queries=torch.randn(2, D), attention=attention, head=nn.Linear(D, 50)), (sequences(),)


@architecture
def positions_folded_into_rows():
    def forward(m, x):
        hidden = m.second(torch.tanh(m.first(x.flatten(0, 1))))
        return hidden.view(len(x), T, 3)

    return Model(forward, first=nn.Linear(D, D), second=nn.Linear(D, 3)), (sequences(),)


@architecture
def frames_folded_into_images_positions_first():
    def forward(m, clips):
        frames = clips.transpose(0, 1).flatten(0, 1)
        features = m.conv(frames).mean((2, 3)).view(2, len(clips), 4)
        return m.head(features.mean(0))

    return Model(forward, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3)), (torch.randn(N, 2, 3, 6, 6),)


@architecture
def experts_on_all_tokens_at_once():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, D, D))

        def forward(self, rows, chosen):
            return torch.stack([row @ self.weights[e] for row, e in zip(rows, chosen, strict=True)])

    def forward(m, x):
        rows = m.first(x).flatten(0, 1)
        shares = m.gate(rows).softmax(-1)
        best = shares.max(-1)
        return (m.experts(rows, best.indices) * best.values.unsqueeze(1)).view(x.shape)

    return Model(forward, first=nn.Linear(D, D), gate=nn.Linear(D, 3), experts=Experts()), (sequences(),)


# ------------------------------------------------------------------ reparametrized, frozen, adapted


@architecture
def weight_norm_and_spectral_norm():
    return nn.Sequential(
        weight_norm(nn.Linear(D, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 4)), orthogonal(nn.Linear(4, 4))
    ), (rows(),)


@architecture
def parametrized_convolution():
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.PReLU(4), nn.Flatten()), (images(),)


@architecture
def low_rank_adaptation_of_a_frozen_layer():
    def forward(m, x):
        return m.base(x) + (x @ m.a) @ m.b

    def adapted(inputs, outputs):
        base = nn.Linear(inputs, outputs).requires_grad_(False)
        return Model(forward, base=base, a=torch.randn(inputs, 2), b=torch.randn(2, outputs))

    return nn.Sequential(adapted(D, D), nn.GELU(), adapted(D, 3)), (sequences(),)


@architecture
def frozen_backbone():
    backbone = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).requires_grad_(False)
    return nn.Sequential(backbone, nn.LayerNorm(D), nn.Linear(D, 3)), (rows(),)


# ------------------------------------------------------------------ images


@architecture
def residual_network_in_place():
    def forward(m, x):
        x = m.relu(m.stem(x))
        y = m.second(m.relu(m.first(x)))
        y += x
        return m.head(m.relu(y).mean((2, 3)))

    convs = {"stem": nn.Conv2d(3, 4, 3, padding=1), "first": nn.Conv2d(4, 4, 3, padding=1)}
    return Model(
        forward, **convs, second=nn.Conv2d(4, 4, 3, padding=1), relu=nn.ReLU(inplace=True), head=nn.Linear(4, 3)
    ), (images(),)


@architecture
def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten())
    return model.to(memory_format=torch.channels_last), (images().to(memory_format=torch.channels_last),)


@architecture
def u_net_with_a_transposed_convolution():
    def forward(m, x):
        low = F.relu(m.down(x))
        return m.out(torch.cat([m.up(low), x], dim=1)).flatten(1)

    parts = {"down": nn.Conv2d(3, 4, 2, 2), "up": nn.ConvTranspose2d(4, 3, 2, 2), "out": nn.Conv2d(6, 1, 3)}
    return Model(forward, **parts), (images(),)


@architecture
def squeeze_and_excitation():
    def forward(m, x):
        x = m.conv(x)
        return (x * m.excite(x.mean((2, 3)))[:, :, None, None]).flatten(1)

    return Model(forward, conv=nn.Conv2d(3, 4, 3), excite=nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())), (images(),)


@architecture
def modulated_by_a_condition():
    def forward(m, x, condition):
        scale, shift = m.condition(condition).chunk(2, dim=1)
        return m.head(m.first(x) * (1 + scale) + shift)

    parts = {"first": nn.Linear(D, 4), "condition": nn.Embedding(3, 8), "head": nn.Linear(4, 3)}
    return Model(forward, **parts), (rows(), torch.randint(3, (N,)))


@architecture
def dicts_in_and_out():
    inner = Model(
        lambda m, *, values, scale=1.0, mode="tanh": {"hidden": scale * m.first(values["x"]).tanh(), "mode": mode},
        first=nn.Linear(D, D),
        gain=torch.randn(D),
    )
    inner.gain.requires_grad_(False)
    forward = lambda m, x: m.head(m.inner(values={"x": x}, scale=2.0)["hidden"])  # noqa: E731
    return Model(forward, inner=inner, head=nn.Linear(D, 3)), (rows(),)
