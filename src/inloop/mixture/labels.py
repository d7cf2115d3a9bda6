"""The labels of a source, counted: their frequencies are the best constant prediction."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from inloop.mixture.sources import IndexedSource, Source

MOST_EXAMPLES = 1000


def label_counts(source: Source) -> Tensor | None:
    """How often each label occurs in some of a source's examples, [C]; None if they have no integer labels."""
    if not isinstance(source, IndexedSource):
        return None
    rows = (
        torch.linspace(0, source.size - 1, min(source.size, MOST_EXAMPLES), device="cpu")
        .round()
        .long()
        .unique()
        .tolist()
    )
    if isinstance(source.dataset, TensorDataset):
        labels = [label_of(tuple(tensor[rows] for tensor in source.dataset.tensors))]
    else:
        labels = [label_of(source.dataset[row]) for row in rows]
    if any(label is None for label in labels):
        return None
    known = torch.cat([label.flatten() for label in labels if label is not None])
    counts = torch.bincount(known[known >= 0])
    return counts if len(counts) else None


def _is_text(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() > 0 and part.dtype in (torch.int64, torch.int32)


def label_of(example: Any) -> Tensor | None:
    """The integer label or labels of an example; None if it has none. A text without labels is its own: a language model predicts it."""
    label = None
    if isinstance(example, dict):
        label = next((example[name] for name in ("labels", "label", "input_ids") if name in example), None)
    elif isinstance(example, (tuple, list)) and example and (len(example) > 1 or _is_text(example[0])):
        label = example[-1]
    if isinstance(label, (bool, float)) or label is None:
        return None
    try:
        label = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if label.is_floating_point() or label.is_complex() else label.long()
