"""The precisions that people train in, and how far a reward may be off in each.

A tolerance is three times the largest error on a pretend device, which rounds what tensor cores round, or more. A reward with a wrong factor, a missing
layer or an example in a wrong place is off by far more: mostly by about one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """How a model is computed.

    Attributes:
        dtype: Of parameters and inputs.
        tolerance: How far a reward may be from the exact one, as a share of the largest reward.
        tf32: Whether products of float32 may be made of factors with ten bits.
        autocast: The type of mixed precision, if any.
    """

    dtype: torch.dtype
    tolerance: float
    tf32: bool = False
    autocast: torch.dtype | None = None

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Allow TF32 inside the block, or forbid it: torch allows it for convolutions and cuDNN's LSTM unless it is told not to."""
        matrices, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matrices.allow_tf32, cudnn.allow_tf32
        matrices.allow_tf32 = cudnn.allow_tf32 = self.tf32
        try:
            yield
        finally:
            matrices.allow_tf32, cudnn.allow_tf32 = before

    def forward(self, device: str) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(torch.device(device).type, self.autocast)


PRECISIONS = {
    "float64": Precision(torch.float64, 1e-9),
    "float32": Precision(torch.float32, 1e-4),
    "TF32": Precision(torch.float32, 4e-2, tf32=True),
    "bfloat16": Precision(torch.float32, 1e-1, autocast=torch.bfloat16),
}
EXACT = PRECISIONS["float64"]
