"""The trail: the way that the parameters have come judges an example.

    m_0 = θ_0        d_t = m_{t-1} - θ_t        r_i = <∇l_i(θ_t), d_t>        m_t = b m_{t-1} + (1 - b) θ_t

r_i is how fast the loss of example i falls along the way from an average of earlier parameters to the present ones. d_t
is known before the backward pass of step t and has no part of it. So, once the first steps are verified,
each layer's call is aligned when its gradient arrives, and nothing is kept. Until the parameters have moved, nothing is
rewarded.

In a network without biases that is homogeneous in L layers, ``<∇l_i(θ), -θ>`` is L times the margin of example i,
``f_y - sum_k p_k f_k``. So a long trail sees, early and at any batch size, which labels do not go with the rest. It
does not tell hard examples from wrong ones, and favours useless ones that are learned (noise, each with its label).
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inloop.alignment import Direction
from inloop.alignment.direction import Computed
from inloop.errors import UsageError
from inloop.references.reference import Reference
from inloop.rewards import Reward
from inloop.step import Judge, Step


class Trail(Reference):
    """Judges step t by the displacement ``m_{t-1} - θ_t``, with m a moving average of the parameters.

    It rewards nothing until the parameters move. It keeps a copy of the trainable ones, in float32 if they are in half.

    Args:
        decay: b; the average looks back over about 1 / (1 - b) steps.
    """

    is_gradient = False
    tells_better = False
    least_effect = 0.1
    rewards_persist = True

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise UsageError(f"Trail(decay={decay}): allowed are numbers from 0 to below 1.")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        self._known: Computed | None = None

    def begin(self, model: nn.Module, reward: Reward) -> None:
        if not reward.needs_tape:
            raise UsageError(
                f"A Trail is a direction, of which {type(reward).__name__} makes no use. Fix: use reference='next', or reward='gar'."
            )
        self._model = weakref.ref(model)
        self.reset()

    def reset(self) -> None:
        """Begin anew at the present parameters, as after they were initialised again."""
        self._averages.clear()
        self._known = None
        self._has_moved = False

    def known_direction(self) -> Direction | None:
        parameters = self._parameters()
        for name, parameter in parameters.items():
            average = self._averages.setdefault(name, _precise(parameter))
            if average.shape != parameter.shape:
                raise UsageError(
                    f"Parameter '{name}' has the shape {tuple(parameter.shape)} and had {tuple(average.shape)}. Fix: call learner.reference.reset() "
                    "after parameters were exchanged or initialised again."
                )
        self._has_moved = self._has_moved or any(
            not torch.equal(self._averages[name], parameter.to(self._averages[name].dtype))
            for name, parameter in parameters.items()
        )
        if not self._has_moved:
            return None
        names: Direction = {name: parameters.get(name) for name, _ in self._named()}
        self._known = Computed(names, self._displacements)
        return self._known

    def _displacements(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        averages = [self._averages[name] for name in parameters]
        precise = [p.to(m.dtype) for p, m in zip(parameters.values(), averages, strict=True)]
        return dict(zip(parameters, torch._foreach_sub(averages, precise), strict=True))

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        known, self._known = self._known, None
        return (None, now) if known is None or current.plain else (current, Judge(known, now.loss))

    @torch.no_grad()
    def end_step(self) -> None:
        parameters = self._parameters()
        averages = [self._averages.setdefault(name, _precise(parameter)) for name, parameter in parameters.items()]
        precise = [p.to(m.dtype) for p, m in zip(parameters.values(), averages, strict=True)]
        if averages:
            torch._foreach_lerp_(averages, precise, 1 - self.decay)

    def detach(self) -> None:
        super().detach()
        self.reset()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        model = self._model()
        return [] if model is None else list(model.named_parameters())

    def _parameters(self) -> dict[str, Tensor]:
        """Return the parameters that are not frozen."""
        return {name: parameter.detach() for name, parameter in self._named() if parameter.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, sharded ones as they are, in parts."""
        return {"averages": {name: value.clone() for name, value in self._averages.items()}, "moved": self._has_moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = self._parameters()
        for name, value in state["averages"].items():
            if name in parameters:
                self._averages[name] = _precise(parameters[name]).copy_(value)
        self._has_moved = state["moved"]


def _precise(parameter: Tensor) -> Tensor:
    """Return a copy, in float32 if the parameter has less: steps of an average are too small for half precision."""
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    return parameter.detach().to(torch.float32) if half else parameter.detach().clone()
