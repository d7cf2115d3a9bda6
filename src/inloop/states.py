"""Is a saved state one that can be loaded? Compares it with the state of the object that is to load it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from inloop.errors import UsageError

# tensors of any length, and the axis that it is the length of
_GROWING = {"means": 0, "numbers": 0, "told_labels": 1, "everyone": 0, "rewarded_rows": 0, "generator": 0}
_MAY_BE_NONE = ("segments", "rewarded_rows", "size")
_MAY_BE_ANYTHING = ("shares", "averages", "state")  # numbers that need not be finite: not known yet, or the model's own
_ANY_KEYS = ("verified", "state")  # kinds of steps, and the parameters that an optimizer has moved


def refuse_other_structure(state: Any, own: Any, path: str) -> None:
    """Raise if ``state`` has other entries, types or shapes than ``own``.

    Args:
        path: The name of the state, for the message.
    """
    name = path.rsplit(".", 1)[-1]
    if state is None and own is not None and name not in _MAY_BE_NONE:
        _refuse(path, state, _described(own))
    if own is None or state is None:
        if state is not None and not isinstance(state, Tensor | Mapping | Sequence):
            _refuse(path, state, "nothing, a tensor or a container")
        return
    if isinstance(own, Tensor):
        fits = isinstance(state, Tensor) and state.dtype == own.dtype and state.dim() == own.dim()
        if not fits or _fixed(state.shape, name) != _fixed(own.shape, name):
            _refuse(path, state, _described(own))
        if not set(path.split(".")) & set(_MAY_BE_ANYTHING) and not bool(state.isfinite().all()):
            raise UsageError(
                f"The state cannot be loaded: {path} has numbers that are not finite. Fix: load an earlier state."
            )
    elif isinstance(own, Mapping):
        if not isinstance(state, Mapping) or (own and state and name not in _ANY_KEYS and state.keys() != own.keys()):
            _refuse(path, state, _described(own))
        for key, value in state.items():
            if key in own or name == "verified":
                refuse_other_structure(value, own.get(key, 0), f"{path}.{key}")
    elif isinstance(own, list | tuple):
        if not isinstance(state, list | tuple):
            _refuse(path, state, "a list")
        for index, value in enumerate(state):
            if own:
                refuse_other_structure(value, own[min(index, len(own) - 1)], f"{path}[{index}]")
    elif type(state) is not type(own) and not (isinstance(own, float) and type(state) is int):
        _refuse(path, state, f"a {type(own).__name__}")
    elif isinstance(own, int) and int(state) < 0:
        _refuse(path, state, "a whole number from 0")


def refuse_no_state(state: Any, own: Mapping[str, Any], kind: str) -> None:
    """Raise unless ``state`` is a mapping with the entries of ``own``, the state of a ``kind``."""
    if isinstance(state, Mapping) and state.keys() == own.keys():
        return
    got = f"it has {sorted(map(str, state))[:5]}" if isinstance(state, Mapping) else f"it is a {type(state).__name__}"
    raise UsageError(f"This is no state of a {kind}: {got}. Fix: give what state_dict() of a {kind} returned.")


def _fixed(shape: Sequence[int], name: str) -> list[int]:
    """The lengths that must agree."""
    return [length for axis, length in enumerate(shape) if axis != _GROWING.get(name)]


def _refuse(path: str, state: Any, needed: str) -> None:
    raise UsageError(
        f"The state cannot be loaded: {path} is {_described(state)}; needed is {needed}. Fix: load a state that such a learner has saved."
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of type {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, sorted(value, key=str))) or 'nothing'}"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
