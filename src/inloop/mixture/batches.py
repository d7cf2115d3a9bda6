"""Batches of examples from different sources."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from inloop.errors import UsageError
from inloop.host import to_device
from inloop.mixture.sources import IndexedSource, Source


def tensors_alike(sources: Sequence[Source]) -> list[tuple[Tensor, ...]]:
    """The tensors of each source, if all sources have tensors of the same dtypes, devices and shapes; else an empty list."""
    datasets = [source.dataset if isinstance(source, IndexedSource) else None for source in sources]
    if not all(type(dataset) is TensorDataset for dataset in datasets):  # a subclass may do more than index
        return []
    tensors_K = [cast(TensorDataset, dataset).tensors for dataset in datasets]
    kinds = {tuple((tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors) for tensors in tensors_K}
    return tensors_K if len(kinds) == 1 else []


def gathered(tensors_K: Sequence[tuple[Tensor, ...]], source_N: Tensor, position_N: Tensor) -> list[Tensor]:
    """The rows of each column, in the order of the examples; the sources' tensors are not copied."""
    order_N = source_N.argsort()
    sizes = torch.bincount(source_N, minlength=len(tensors_K)).tolist()
    places_2N = torch.stack([order_N, position_N[order_N]])
    places = {device: to_device(places_2N, device) for device in {tensor.device for tensor in tensors_K[0]}}
    columns = []
    for tensors in zip(*tensors_K, strict=True):  # of all sources, for one column
        column = tensors[0].new_empty((len(source_N), *tensors[0].shape[1:]))
        for tensor, places_2n in zip(tensors, places[column.device].split(sizes, dim=1), strict=True):
            column.index_copy_(0, places_2n[0], tensor.index_select(0, places_2n[1]))
        columns.append(column)
    return columns


def collated(examples: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """``collate(examples)``.

    Raises:
        UsageError: If it fails because the examples differ in form, or if the default would leave out entries that only some of them have.
    """
    if collate is default_collate and len({_entries(example) for example in examples}) > 1:
        raise _different_forms(examples, "they have different entries")
    try:
        return collate(examples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        if len({_form_of(example) for example in examples}) == 1:
            raise
        raise _different_forms(examples, str(error).splitlines()[0]) from error


def with_tensors(example: Any) -> Any:
    """The example with its numbers as tensors, since other sources may have tensors there."""
    if isinstance(example, (int, float)):
        return torch.as_tensor(example, dtype=torch.float64 if isinstance(example, float) else None)
    if type(example) in (tuple, list) and not all(isinstance(part, (int, float)) for part in example):
        return [with_tensors(part) if isinstance(part, (int, float)) else part for part in example]
    if type(example) is dict:
        return {name: with_tensors(part) if isinstance(part, (int, float)) else part for name, part in example.items()}
    return example


def _entries(example: Any) -> tuple[Any, ...] | None:
    return tuple(sorted(map(str, example))) if isinstance(example, dict) else None


def _different_forms(examples: list[Any], reason: str) -> UsageError:
    different = " and ".join(dict.fromkeys(_form_of(example) for example in examples))
    return UsageError(
        f"Examples of different forms cannot be put into one batch: {different} ({reason}). Fix: give all sources one form, or pass collate=."
    )


def _form_of(example: Any) -> str:
    """A short description of an example's types and shapes."""
    if isinstance(example, Tensor):
        return f"a tensor {list(example.shape)}" + ("" if example.device.type == "cpu" else f" on {example.device}")
    if isinstance(example, dict):
        return "{" + ", ".join(f"{name}: {_form_of(part)}" for name, part in example.items()) + "}"
    if isinstance(example, (tuple, list)):
        return f"({', '.join(_form_of(part) for part in example)})"
    return f"a {type(example).__name__}"
