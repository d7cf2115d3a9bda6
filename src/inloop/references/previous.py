"""The previous step as the reference."""

import weakref
from typing import Any

from torch import nn

from inloop.alignment import Direction
from inloop.distributed import is_sharded
from inloop.errors import UsageError
from inloop.references.reference import Reference
from inloop.rewards import Reward
from inloop.step import Judge, Step


class Previous(Reference):
    """Judges step t by the gradient of step t-1, which is known before the step and a weaker judge."""

    def __init__(self) -> None:
        super().__init__()
        self._before: Judge | None = None

    def begin(self, model: nn.Module, reward: Reward) -> None:
        if not reward.needs_tape:
            raise UsageError(
                f"reference='previous' is a gradient, of which {type(reward).__name__} makes no use. Fix: use reference='next', or reward='gar'."
            )
        self._before = None
        self._model = weakref.ref(model)

    def drop(self) -> None:
        """Forget the previous gradient too: after a dropped step it would be that of two steps before."""
        super().drop()
        self._before = None

    def known_direction(self) -> Direction | None:
        return None if self._before is None else self._before.direction

    def match(self, current: Step, now: Judge) -> tuple[Step | None, Judge]:
        before, self._before = self._before, now.detached()
        return (None, now) if before is None or current.plain else (current, before)

    def state_dict(self) -> dict[str, Any]:
        if self._before is None or any(is_sharded(value) for value in self._before.direction.values()):
            # A sharded one would be a gradient of the whole model. The next step goes unrewarded, in this run too.
            self._before = None
            return {"previous": None}
        before = self._before
        return {"previous": {"direction": dict(before.direction), "loss": float(before.loss), "scale": before.scale}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, saved = self._model(), state["previous"]
        if model is None or saved is None:
            self._before = None
            return
        devices = {name: parameter.device for name, parameter in model.named_parameters()}
        moved = {name: None if g is None else g.to(devices[name]) for name, g in saved["direction"].items()}
        self._before = Judge(moved, saved["loss"], saved["scale"])
