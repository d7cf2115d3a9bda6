"""The exact fallback, for any module that no rule covers: LSTM, MultiheadAttention, a user's own.

The module and everything below it is replayed as one function f at the parameters, buffers and random state of
step t. Give every example a weight, w_i = 1. What the module receives as its gradient is then
``J^T (w ⊙ dout)``, linear in w, and its dot product with the direction has the contributions as its derivative:

    c_i = d/dw_i <J^T (w ⊙ dout), g> = <dout_i, (J g)_i>

It uses reverse mode only, since that is what defined the module's gradient in training: forward mode would see
through ``torch.no_grad`` and past the backward of a custom function. Cost: about one forward and two backward passes
of the module. Where an operation has no second derivative, one backward pass for each example gives the same numbers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inloop.alignment.call import LayerCall, tensors_in
from inloop.alignment.rules import Rule
from inloop.errors import UnsupportedLayerError


@dataclass(frozen=True, slots=True)
class BlackBoxState:
    """What a module had before its forward pass: a twin with its parameters and buffers, random state, input versions."""

    layer: nn.Module
    random_state: Mapping[str, Tensor]
    versions: tuple[int, ...]

    def was_random(self) -> bool:
        """Whether random numbers were drawn since."""
        devices = [torch.device(name) for name in self.random_state]
        now = random_state(devices[-1])
        return any(not torch.equal(state, now[name]) for name, state in self.random_state.items())


def align_black_box(call: LayerCall, direction: Mapping[str, Tensor]) -> Tensor:
    """Contributions through a module of unknown form; see the module docstring."""
    wanted = list(call.parameter_names)
    with _as_in_step_t(call), torch.enable_grad():
        parameters = {
            name: value.detach().requires_grad_(name in call.parameter_names)
            for name, value in call.layer.named_parameters(remove_duplicate=False)
        }
        out = checked(call, tensors_in(call.run(parameters)))[call.output_index]
        inputs, directions = [parameters[name] for name in wanted], [direction[name] for name in wanted]
        try:
            contributions = _derivative_by_example_weight(call, out, inputs, directions)
        except RuntimeError:  # some operation has no second derivative
            contributions = None
        return contributions if contributions is not None else _one_backward_per_example(call, out, inputs, directions)


def per_example_gradients(call: LayerCall) -> dict[str, Tensor]:
    """``∂l_i/∂θ`` of every example through this call, [N, *shape], by one backward pass for each."""
    with _as_in_step_t(call), torch.enable_grad():
        parameters = {
            name: value.detach().requires_grad_() for name, value in call.layer.named_parameters(remove_duplicate=False)
        }
        out = checked(call, tensors_in(call.run(parameters)))[call.output_index]
        names = list(call.parameter_names)
        rows = [_gradients_of(call, out, [parameters[name] for name in names], i) for i in range(call.num_examples)]
        return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)}


def _gradients_of(call: LayerCall, out: Tensor, inputs: list[Tensor], example: int) -> list[Tensor]:
    """Of one example, dense."""
    alone_N = torch.zeros(call.num_examples, dtype=call.dtype, device=call.device)
    alone_N[example] = 1
    gradients = torch.autograd.grad(out, inputs, call.weighted(alone_N), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, inputs, strict=True)
    return [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in pairs]


def fingerprint(out: Tensor) -> Tensor:
    """Two numbers a row that tell one output from another: the sum and the sum of magnitudes, [2, rows]."""
    real = torch.view_as_real(out.detach().resolve_conj()) if out.is_complex() else out.detach()
    values = real if real.is_floating_point() else real.double()
    values = values.reshape(len(out) if out.dim() else 1, -1) if out.numel() else values.new_zeros(1, 1)
    return torch.stack([values.sum(dim=1, dtype=torch.float64), values.abs().sum(dim=1, dtype=torch.float64)])


def is_same_output(now: Tensor, then: Tensor, dtype: torch.dtype) -> bool:
    """Whether two fingerprints are equal up to the rounding of ``dtype``."""
    close = min(1e3 * torch.finfo(dtype).eps, 0.05) * then[1] + 1e-30
    return now.shape == then.shape and bool(((now - then).abs() <= close).all())


def checked(call: LayerCall, outputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a replay, if they are those of step t."""
    inexact = [out.dtype for out in outputs if out.is_floating_point() or out.is_complex()]
    coarsest = max(inexact, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    same = len(outputs) == len(call.fingerprints) and all(
        is_same_output(fingerprint(out), then, coarsest) for out, then in zip(outputs, call.fingerprints, strict=True)
    )
    if not same:
        raise UnsupportedLayerError(
            f"{repr(call.name) if call.name else 'The model'} ({type(call.layer).__name__}) gives another output when it is run again with the same input, parameters, "
            "buffers and torch random state. Its forward depends on something else: state kept in attributes, Python's random, a "
            "method or child held outside the module; or optimizer.step() came before learner.step(loss). Fix: keep state in buffers, or leave it "
            "out with layers=; call learner.step(loss) first."
        )
    return outputs


def _derivative_by_example_weight(
    call: LayerCall, out: Tensor, inputs: list[Tensor], directions: list[Tensor]
) -> Tensor | None:
    weights_N = torch.ones(call.num_examples, dtype=call.dtype, device=call.device, requires_grad=True)
    gradients = torch.autograd.grad(
        out, inputs, call.weighted(weights_N), create_graph=True, retain_graph=True, allow_unused=True
    )
    alignment = _dot(gradients, directions)
    if not alignment.requires_grad:
        return None
    (contributions_N,) = torch.autograd.grad(alignment, weights_N, retain_graph=True)
    # Linear in w, so the parts must add up; a backward that hides part of itself from autograd fails this.
    share = min(1e3 * torch.finfo(call.dout.dtype).eps, 0.1)
    parts = contributions_N.double()
    return contributions_N if (parts.sum() - alignment).abs() <= share * parts.abs().sum() else None


def _one_backward_per_example(call: LayerCall, out: Tensor, inputs: list[Tensor], directions: list[Tensor]) -> Tensor:
    contributions = [
        _dot(tuple(_gradients_of(call, out, inputs, example)), directions) for example in range(call.num_examples)
    ]
    return torch.stack(contributions).detach() if contributions else call.dout.new_zeros(0)


def _dot(gradients: tuple[Tensor | None, ...], directions: list[Tensor]) -> Tensor:
    pairs = zip(gradients, directions, strict=True)
    dense = [(g.to_dense() if g.is_sparse else g, d) for g, d in pairs if g is not None]
    zero = torch.zeros((), dtype=directions[0].dtype, device=directions[0].device)
    return sum(((g * d).sum() for g, d in dense), start=zero)


@contextmanager
def randomness_of(call: LayerCall) -> Iterator[None]:
    """The random numbers of step t, and afterwards those of now."""
    devices = [torch.device(name) for name in call.random_state if name != "cpu"]
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        restore_random_state(call.random_state)
        yield


@contextmanager
def _as_in_step_t(call: LayerCall) -> Iterator[None]:
    """Step t's random numbers, and kernels that can be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), randomness_of(call):
        yield


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators that a module on ``device`` may draw from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if name == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(torch.device(name)).set_rng_state(value, torch.device(name))


BLACK_BOX = Rule(
    align_black_box,
    parameters=frozenset(),
    example_dims=lambda module: 0,
    when=lambda module: True,
    keeps_parameters=True,
    replays=True,
)
