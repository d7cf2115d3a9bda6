"""The exact fallback for any module without a rule: LSTM, MultiheadAttention, a user's own.

It runs the module and everything below it again as one function f, at the parameters, buffers and random state of step
t. Give every example a weight, w_i = 1. The parameters then receive the gradient ``J^T (w ⊙ dout)``, linear in w. The
contributions are the derivative of its dot product with the direction:

    c_i = d/dw_i <J^T (w ⊙ dout), g> = <dout_i, (J g)_i>

It uses reverse mode only, which defined the module's gradient in training: forward mode would see through
``torch.no_grad`` and past the backward of a custom function. The cost is about one forward and two backward passes of
the module. If an operation has no second derivative, one backward pass per example gives the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inloop.alignment.call import Recorded
from inloop.alignment.inputs import Inputs, have_objects, with_own_objects
from inloop.alignment.kept import Kept, tensors_in
from inloop.errors import UnsupportedLayerError


class _OtherOutputError(UnsupportedLayerError):
    """A module gave another output when it was run again."""


@dataclass(frozen=True, slots=True)
class BeforeCall:
    """A module's state before its forward pass: a twin (parameters, buffers), the random state, the input versions.

    Attributes:
        inputs: The inputs, if there are objects among them that the forward pass may change; else None.
    """

    layer: nn.Module
    random_state: Mapping[str, Tensor]
    versions: tuple[int, ...]
    inputs: Inputs | None

    def drawn_from(self) -> Mapping[str, Tensor]:
        """Return the random state if the forward pass has drawn random numbers since, else an empty dict."""
        now = random_state(torch.device(list(self.random_state)[-1]))
        same = all(torch.equal(state, now[name]) for name, state in self.random_state.items())
        return {} if same else self.random_state


@dataclass(eq=False, kw_only=True)
class RunAgain(Recorded):
    """A call that can run again with everything it had in step t. Its output must then be the same.

    Attributes:
        random_state: The random state before the call, by device, if the call drew random numbers.
        fingerprints: One of each output, to check that running again gives the same output.
    """

    random_state: Mapping[str, Tensor]
    fingerprints: tuple[Tensor, ...]

    @property
    def needs_backward(self) -> bool:
        return True

    def map(self, pack: Callable[[Tensor], Any]) -> Kept:
        """Return the call itself: rounded inputs would change the output."""
        return self

    def tensors(self) -> list[Tensor]:
        return [*Recorded.tensors(self), *self.layer.parameters()]

    def run(self, parameters: Mapping[str, Tensor], **attributes: object) -> Any:
        args, kwargs = self.args, self.kwargs
        if have_objects((args, kwargs)):
            args, kwargs = with_own_objects((args, kwargs))
        return Recorded.run(self.but(args=args, kwargs=kwargs), parameters, **attributes)

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Use the random state of step t inside the block; restore the present one after it."""
        devices = [torch.device(name) for name in self.random_state if name != "cpu"]
        with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
            restore_random_state(self.random_state)
            yield

    def checked(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs of running again; raise if they differ from those of step t."""
        inexact = [out.dtype for out in outputs if out.is_floating_point() or out.is_complex()]
        coarsest = max(inexact, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        same = len(outputs) == len(self.fingerprints) and all(
            _is_same_output(fingerprint(out), then, coarsest)
            for out, then in zip(outputs, self.fingerprints, strict=True)
        )
        if not same:
            if recurrent := next(filter(_draws_by_cudnn, self.layer.modules()), None):
                raise _OtherOutputError(
                    f"{repr(self.name) if self.name else 'The model'} cannot be run again: between the layers of its {type(recurrent).__name__}, cuDNN draws "
                    "dropout from a state of its own, which cannot be restored. Fix: torch.backends.cudnn.enabled = False, or dropout=0 and nn.Dropout "
                    "between recurrent modules of one layer each, or leave the module out with layers=."
                )
            raise _OtherOutputError(
                f"{repr(self.name) if self.name else 'The model'} ({type(self.layer).__name__}) gives another output when it is run again "
                "with the same input, parameters, buffers and torch random state. Its forward depends on something else: state kept "
                "in attributes, Python's random, a method or child held outside the module; or optimizer.step() came before "
                "learner.step(loss). Fix: keep state in buffers, or leave the module out with layers=; call learner.step(loss) first."
            )
        return outputs

    def refuse_parameters_of_others(self, outside: list[Tensor]) -> None:
        """Raise if running again used parameters outside the twin: their part of the gradients would be missing."""
        if outside:
            raise UnsupportedLayerError(
                f"'{self.name}' ({type(self.layer).__name__}) uses parameters, the first of shape {tuple(outside[0].shape)}, that are not its own: "
                "a function or module held outside of it. It cannot be run again. Fix: make that a submodule, or leave it out with layers=."
            )


@dataclass(eq=False, kw_only=True)
class BlackBoxCall(RunAgain):
    """A call of a module without a rule, with everything needed to run it again as one function."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{type(self.layer).__name__}, run again"

    def align(self, direction: Mapping[str, Tensor | None], magnitudes: bool = False) -> Tensor:
        """Align; see the module docstring. Magnitudes within an example are unknown; the contributions serve."""
        self.refuse_overwritten()
        try:
            with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):  # can be differentiated twice
                return self._align_by_these_kernels(direction)
        except _OtherOutputError:  # they may draw the mask of dropout in another order than those of step t
            return self._align_by_these_kernels(direction)

    def _align_by_these_kernels(self, direction: Mapping[str, Tensor | None]) -> Tensor:
        with self.randomness(), torch.enable_grad():
            parameters = {
                name: value.detach().requires_grad_(name in self.parameter_names)
                for name, value in self.layer.named_parameters(remove_duplicate=False)
            }
            out = self.checked(tensors_in(self.run(parameters)))[self.output_index]
            self.refuse_parameters_of_others(graph_of(out)[1])
            if not out.requires_grad:  # this time its parameters do not enter the output
                return torch.zeros(self.num_examples, dtype=self.dtype, device=self.device)
            inputs = [parameters[name] for name in self.parameter_names]
            given = [direction.get(name) for name in self.parameter_names]
            directions = [torch.zeros_like(p) if d is None else d.to(p) for p, d in zip(inputs, given, strict=True)]
            try:
                contributions = _derivative_by_example_weight(self, out, inputs, directions)
            except RuntimeError:  # some operation has no second derivative
                contributions = None
            if contributions is None:
                contributions = _one_backward_per_example(self, out, inputs, directions)
            return contributions.detach()


def fingerprint(out: Tensor) -> Tensor:
    """Return two numbers per row that tell outputs apart: the sum and the sum of magnitudes, [2, rows]."""
    real = torch.view_as_real(out.detach().resolve_conj()) if out.is_complex() else out.detach()
    values = real if real.is_floating_point() else real.double()
    values = values.reshape(len(out) if out.dim() else 1, -1) if out.numel() else values.new_zeros(1, 1)
    return torch.stack([values.sum(dim=1, dtype=torch.float64), values.abs().sum(dim=1, dtype=torch.float64)])


def _draws_by_cudnn(module: nn.Module) -> bool:
    is_recurrent = isinstance(module, nn.RNNBase) and module.training and module.dropout > 0
    return is_recurrent and torch.backends.cudnn.enabled and any(p.is_cuda for p in module.parameters())


def _is_same_output(now: Tensor, then: Tensor, dtype: torch.dtype) -> bool:
    """Whether two fingerprints are equal up to the rounding of ``dtype``. Scores of what is masked may be -inf."""
    close = min(1e3 * torch.finfo(dtype).eps, 0.05) * then[1] + 1e-30
    return now.shape == then.shape and bool(((now == then) | ((now - then).abs() <= close)).all())


def _derivative_by_example_weight(
    call: Recorded, out: Tensor, inputs: list[Tensor], directions: list[Tensor]
) -> Tensor | None:
    weights_N = torch.ones(call.num_examples, dtype=call.dtype, device=call.device, requires_grad=True)
    gradients = torch.autograd.grad(
        out, inputs, call.weighted(weights_N), create_graph=True, retain_graph=True, allow_unused=True
    )
    alignment = _dot(gradients, directions)
    if not alignment.requires_grad:
        return None
    (contributions_N,) = torch.autograd.grad(alignment, weights_N, retain_graph=True)
    # The parts must add up, since all is linear in w. A backward that hides part of itself from autograd fails this.
    share = min(1e3 * torch.finfo(call.dout.dtype).eps, 0.1)
    parts = contributions_N.double()
    return contributions_N if (parts.sum() - alignment).abs() <= share * parts.abs().sum() else None


def _one_backward_per_example(call: Recorded, out: Tensor, inputs: list[Tensor], directions: list[Tensor]) -> Tensor:
    contributions_N = torch.zeros(call.num_examples, dtype=call.dtype, device=call.device)
    for example in range(call.num_examples):
        alone_N = torch.zeros_like(contributions_N)
        alone_N[example] = 1
        gradients = torch.autograd.grad(out, inputs, call.weighted(alone_N), retain_graph=True, allow_unused=True)
        contributions_N[example] = _dot(gradients, directions)
    return contributions_N


def _dot(gradients: tuple[Tensor | None, ...], directions: list[Tensor]) -> Tensor:
    pairs = zip(gradients, directions, strict=True)
    dense = [(g.to_dense() if g.is_sparse else g, d) for g, d in pairs if g is not None]
    zero = torch.zeros((), dtype=directions[0].dtype, device=directions[0].device)
    return sum(((g * d).sum() for g, d in dense), start=zero)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the generators that a module on ``device`` may draw from."""
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


def graph_of(output: Tensor) -> tuple[set[int], list[Tensor], bool]:
    """Return the ids of the leaves below ``output``, the ``nn.Parameter`` ones, and whether a checkpoint is reentrant.

    Copies are plain tensors, so an ``nn.Parameter`` belongs to no twin. A reentrant checkpoint has its own graph, so it
    takes a whole backward pass.
    """
    leaves, outside, is_reentrant = set(), list[Tensor](), False
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_reentrant |= node.name() == "CheckpointFunctionBackward"
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
            if isinstance(leaf, nn.Parameter):
                outside.append(leaf)
        waiting.extend(function for function, _ in node.next_functions)
    return leaves, outside, is_reentrant
