"""The paper's Algorithm 1: meta-parameters φ that the loss is differentiable in, learned in the training loop.

    l_t      <- l(θ_t, φ_t)
    θ_{t+1}  <- θ_t - α ∇_θ l_t                            the user's SGD
    φ_{t+1}  <- sg(φ_t - β ∇_{φ_{t-1}} l_t)                through θ_t only

l_t depends on φ_{t-1} through the update that made θ_t, and, if nothing is done, also directly, since φ_t came from
φ_{t-1}; that second term would make step t easy instead of making the model generalise. The paper's two remedies: stop
the gradient between φ_{t-1} and φ_t, or let every second step use a loss without φ. And two computations:

* "reuse": ∇_{φ_{t-1}} l_t = -α' ∇_θ l_t · ∂²l_{t-1} / ∂θ∂φ, with the gradient that step t computes anyway.
* "unroll": evaluate l_t at θ_t(φ_{t-1}), parameters that still carry the graph of the update, and differentiate.

The paper prints the first with a first derivative of l_{t-1}; the mixed second one is meant.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from inloop.alignment.black_box import random_state, restore_random_state
from inloop.distributed import is_distributed
from inloop.errors import UsageError
from inloop.randomness import untouched_generators

log = logging.getLogger("inloop")

LossFunction = Callable[[nn.Module | None], Tensor]


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The step before: its gradient with its graph, its φ, and how far θ moved for each unit of gradient."""

    gradients: dict[str, Tensor]
    phi: dict[str, Tensor]
    rates: dict[str, float]


class MetaGradient:
    """Learns the parameters of ``meta`` by the gradient of the next step's loss.

    Args:
        model: The model in training, θ.
        meta: A module that holds φ.
        optimizer: The model's optimizer, a plain ``torch.optim.SGD``; exact with momentum, Nesterov and weight decay.
        meta_optimizer: The optimizer of ``meta``'s parameters; by default ``Adam(lr=0.1)``.
        remedy: "stop-gradient" or "phi-free" (every second step calls the loss with None instead of ``meta``).
        computation: "reuse" or "unroll" (which evaluates the loss a second time).

    Example:
        A learned temperature::

            temperature = Temperature()                                   # an nn.Module
            learner = inloop.MetaGradient(model, temperature, optimizer)
            for x, y in batches:
                loss = learner.step(lambda meta: F.cross_entropy(meta(model(x)), y))    # fills .grad
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        meta: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        meta_optimizer: torch.optim.Optimizer | None = None,
        remedy: Literal["stop-gradient", "phi-free"] = "stop-gradient",
        computation: Literal["reuse", "unroll"] = "reuse",
    ) -> None:
        if remedy not in ("stop-gradient", "phi-free"):
            raise UsageError(f"remedy={remedy!r}: allowed are 'stop-gradient' and 'phi-free'.")
        if is_distributed():
            raise UsageError(
                "MetaGradient differentiates a step of one process, and there are several. Fix: train in one process, or learn a sampled choice "
                "with inloop.InLoop."
            )
        if computation not in ("reuse", "unroll"):
            raise UsageError(f"computation={computation!r}: allowed are 'reuse' and 'unroll'.")
        if not isinstance(optimizer, torch.optim.SGD) or type(optimizer).step is not torch.optim.SGD.step:
            raise UsageError(
                f"optimizer is {type(optimizer).__name__}; Algorithm 1 differentiates the update itself and knows torch.optim.SGD "
                "only. Fix: use SGD, or learn a sampled choice with inloop.InLoop, which works with any optimizer."
            )
        if not isinstance(meta, nn.Module):
            raise UsageError(f"meta is a {type(meta).__name__}; φ must be the parameters of an nn.Module.")
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise UsageError("The optimizer holds no parameter of the model. Fix: give the optimizer that trains it.")
        self.model = model
        self.meta = meta
        self.optimizer = optimizer
        self.meta_optimizer = meta_optimizer or torch.optim.Adam(meta.parameters(), lr=0.1)
        self.remedy = remedy
        self.computation = computation
        self.num_steps = 0
        self._both = _Both(model, meta)
        self._last: _LastStep | None = None
        self._expected: dict[str, Tensor] | None = None

    def step(self, loss_function: LossFunction) -> Tensor:
        """Compute this step's loss and gradients, and update φ through the step before.

        Call it in place of ``loss.backward()``; it adds to ``.grad`` of the model's parameters. ``loss_function`` receives
        ``meta``, or None on a φ-free step, and must reach θ and φ through ``model`` and ``meta`` only.

        Returns:
            The loss, without graph.
        """
        self._refuse_foreign_update()
        phi_free = self.remedy == "phi-free" and self.num_steps % 2 == 1
        # optimizer.step() works in place and would spoil a graph that outlives it: copy the step's parameters.
        theta, phi = _copied_parameters(self.model), _copied_parameters(self.meta)
        before = self._random_state_and_buffers() if self.computation == "unroll" else None
        loss = self._evaluate(loss_function, theta, phi, phi_free)
        if self.num_steps == 0:
            _refuse_loss_without(phi, loss)
        gradients = _gradients(loss, theta, create_graph=not phi_free)
        if self._last is not None:
            if before is None:
                meta_gradient = self._reuse(self._last, gradients)
            else:
                random_state, buffers = before
                with (
                    untouched_generators()
                ):  # the same loss again: with the same dropout, and statistics move only once
                    restore_random_state(random_state)
                    meta_gradient = self._unroll(self._last, theta, phi, buffers, loss_function, phi_free)
            self._update_meta(meta_gradient)
        for name, parameter in self.model.named_parameters():
            if name in gradients:
                own = gradients[name].detach()
                parameter.grad = own.clone() if parameter.grad is None else parameter.grad + own
        self._last = None if phi_free else _LastStep(gradients, phi, self._rates())
        if self.num_steps == 0:
            self._expected = self._update_to_expect()
        self.num_steps += 1
        return loss.detach()

    def _random_state_and_buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        device = next(self._both.parameters()).device
        return random_state(device), {name: buffer.clone() for name, buffer in self._both.named_buffers()}

    def state_dict(self) -> dict[str, Any]:
        """φ, its optimizer and the number of steps. Drops the last step: it will not move φ."""
        self._last = None
        return {
            "meta": self.meta.state_dict(),
            "meta_optimizer": self.meta_optimizer.state_dict(),
            "num_steps": self.num_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._last, self._expected = None, None
        self.meta.load_state_dict(state["meta"])
        self.meta_optimizer.load_state_dict(state["meta_optimizer"])
        self.num_steps = state["num_steps"]

    def _evaluate(
        self,
        loss_function: LossFunction,
        theta: dict[str, Tensor],
        phi: dict[str, Tensor],
        phi_free: bool,
        **buffers: Tensor,
    ) -> Tensor:
        tensors = {f"model.{n}": v for n, v in theta.items()} | {f"meta.{n}": v for n, v in phi.items()} | buffers
        loss: Tensor = functional_call(self._both, tensors, (loss_function, phi_free))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"The loss function returned {got}; a scalar with its graph is needed.")
        return loss

    def _reuse(self, last: _LastStep, gradients: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """``∇_{φ_{t-1}} <∇_θ l_{t-1}, -α' ∇_θ l_t>`` with the second factor held fixed."""
        names = [name for name in last.gradients if name in gradients and last.gradients[name].requires_grad]
        pushed = [-last.rates[name] * gradients[name].detach() for name in names]
        phi = _trainable(last.phi)
        derivatives = torch.autograd.grad(
            [last.gradients[n] for n in names], list(phi.values()), pushed, allow_unused=True
        )
        return dict(zip(phi, derivatives, strict=True))

    def _unroll(
        self,
        last: _LastStep,
        theta: dict[str, Tensor],
        phi: dict[str, Tensor],
        buffers: dict[str, Tensor],
        loss_function: LossFunction,
        phi_free: bool,
    ) -> dict[str, Tensor | None]:
        """``∇_{φ_{t-1}} l_t(θ_t(φ_{t-1}))``; θ_t has its real value and the graph of the update."""
        unrolled = {
            name: value.detach() - last.rates[name] * (last.gradients[name] - last.gradients[name].detach())
            if name in last.gradients
            else value.detach()
            for name, value in theta.items()
        }
        loss = self._evaluate(loss_function, unrolled, phi, phi_free, **buffers)
        wanted = _trainable(last.phi)
        derivatives = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, derivatives, strict=True))

    def _update_meta(self, meta_gradient: dict[str, Tensor | None]) -> None:
        if not all(value is None or bool(value.isfinite().all()) for value in meta_gradient.values()):
            log.warning(
                "inloop: dropped the meta-gradient of step %d: it is not finite; the meta-parameters stay",
                self.num_steps,
            )
            return
        for name, parameter in self.meta.named_parameters():
            parameter.grad = meta_gradient.get(name)
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad()

    def _rates(self) -> dict[str, float]:
        """``-dθ_{t+1}/dg_t`` of the SGD step to come, for each parameter; zero where the optimizer does not touch it."""
        rates = {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            momentum, dampening = group["momentum"], group["dampening"]
            for parameter in group["params"]:
                started = self.optimizer.state[parameter].get("momentum_buffer") is not None
                share = 1 - dampening if started else 1.0  # the first gradient enters the buffer whole
                factor = 1.0 if momentum == 0 else 1 + momentum * share if group["nesterov"] else share
                sign = -1.0 if group["maximize"] else 1.0
                rates[names.get(id(parameter), "")] = sign * float(group["lr"]) * factor
        return {name: rates.get(name, 0.0) for name, _ in self.model.named_parameters()}

    def _update_to_expect(self) -> dict[str, Tensor]:
        """The parameters after a plain SGD step on the present gradients; the next call compares with them."""
        trial = copy.deepcopy(self.optimizer)
        for group, trial_group in zip(self.optimizer.param_groups, trial.param_groups, strict=True):
            for parameter, trial_parameter in zip(group["params"], trial_group["params"], strict=True):
                trial_parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        trial.step()
        pairs = zip(self.optimizer.param_groups, trial.param_groups, strict=True)
        moved = {id(p): t.detach() for g, tg in pairs for p, t in zip(g["params"], tg["params"], strict=True)}
        return {name: moved[id(p)] for name, p in self.model.named_parameters() if id(p) in moved}

    def _refuse_foreign_update(self) -> None:
        """Once, after the first step: refuse a model that did not move by its optimizer's step."""
        expected, self._expected = self._expected, None
        parameters = dict(self.model.named_parameters())
        for name, value in (expected or {}).items():
            if not torch.allclose(parameters[name], value, rtol=1e-4, atol=1e-6):
                raise UsageError(
                    f"Parameter '{name}' did not move by the SGD step on the gradient that MetaGradient.step left. Fix: call "
                    "optimizer.step() right after it, without clipping or changing gradients, then optimizer.zero_grad()."
                )


class _Both(nn.Module):
    """Model and meta in one module, so that one functional call replaces the parameters of both."""

    def __init__(self, model: nn.Module, meta: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.meta = meta

    def forward(self, loss_function: LossFunction, phi_free: bool) -> Tensor:
        return loss_function(None if phi_free else self.meta)


def _copied_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}


def _trainable(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in parameters.items() if value.requires_grad}


def _refuse_loss_without(phi: dict[str, Tensor], loss: Tensor) -> None:
    derivatives = torch.autograd.grad(loss, list(_trainable(phi).values()), retain_graph=True, allow_unused=True)
    if all(derivative is None for derivative in derivatives):
        raise UsageError(
            "The loss does not depend on the meta-parameters. Fix: use the module that the loss function receives."
        )


def _gradients(loss: Tensor, theta: dict[str, Tensor], create_graph: bool) -> dict[str, Tensor]:
    """``∇_θ loss`` by name, for the parameters that the loss depends on."""
    names = [name for name, value in theta.items() if value.requires_grad]
    values = torch.autograd.grad(loss, [theta[n] for n in names], create_graph=create_graph, allow_unused=True)
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}
