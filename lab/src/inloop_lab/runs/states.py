"""The state of an experiment, put together from the states of its parts and torch's random state."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def save_parts(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """The states of the parts by name.

    A learner's drops the step that waits for its reward. So ``train_to_end`` saves after every epoch, into a folder or not.
    """
    return {name: part.state_dict() for name, part in parts.items()} | {"torch": torch.get_rng_state()}


def load_parts(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Continue from :func:`save_parts`."""
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["torch"])
