"""How the loss of each source moves, from the losses of its examples. Axis K counts the sources."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from inloop.policies.policy import summarise_by_choice
from inloop.verdicts.sums import SourceSums

FIRST = 100  # examples of a source whose mean loss is its first loss
RECENT = 500  # examples, about, that its recent loss is the mean of


def constant_losses(counts: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The losses of two constant predictions for each source, [K] each: from its own label frequencies, and from those of all sources.

    They are nan for a source whose labels are not known.

    Args:
        counts: How often each label occurs in each source.
    """
    most = max([len(count) for count in counts if count is not None], default=1)
    rows = [
        torch.full((most,), torch.nan) if count is None else F.pad(count, (0, most - len(count))) for count in counts
    ]
    own_KC = torch.stack([row.double() / row.sum() for row in rows])
    pooled_C = own_KC.nanmean(dim=0)
    own_K = -torch.special.xlogy(own_KC, own_KC).sum(dim=1)
    return own_K, -torch.special.xlogy(own_KC, pooled_C.expand_as(own_KC)).sum(dim=1)


class SourceLosses(SourceSums):
    """The first and the recent mean loss of each source; nan for a source without examples."""

    def __init__(self, num_sources: int) -> None:
        # number of examples, sum of the first losses and their number; recent mean, and recent mean of squares
        super().__init__(5, num_sources)

    def add(self, source_N: Tensor, losses_N: Tensor) -> None:
        """Add the examples of one step; a source with a loss that is not finite is left out of it."""
        seen = summarise_by_choice(source_N, self._sums.shape[1], losses_N.detach().cpu())
        squares = summarise_by_choice(source_N, self._sums.shape[1], losses_N.detach().cpu().double().square())
        counts_K = torch.where(seen.mean_K.isfinite() & squares.mean_K.isfinite(), seen.count_K, 0).double()
        mean_K, square_K = seen.mean_K.nan_to_num(0.0, 0.0, 0.0), squares.mean_K.nan_to_num(0.0, 0.0, 0.0)
        number_K, first_K, firsts_K, recent_K, recent2_K = self._sums
        early_K = torch.where(number_K < FIRST, counts_K, 0.0)
        first_K += early_K * mean_K
        firsts_K += early_K
        number_K += counts_K
        # A mean over all examples at first, then over about RECENT of them.
        weight_K = torch.maximum(1 - torch.exp(-counts_K / RECENT), counts_K / number_K.clamp_min(1))
        recent_K += weight_K * (mean_K - recent_K)
        recent2_K += weight_K * (square_K - recent2_K)

    @property
    def number_K(self) -> Tensor:
        """The number of examples of each source."""
        return self._sums[0]

    @property
    def first_K(self) -> Tensor:
        return self._sums[1] / self._sums[2]

    @property
    def recent_K(self) -> Tensor:
        recent_K: Tensor = torch.where(self._sums[0] > 0, self._sums[3], torch.nan)
        return recent_K

    @property
    def error_K(self) -> Tensor:
        """The standard error of the recent loss, [K]."""
        number_K, *_, recent_K, recent2_K = self._sums
        error_K: Tensor = ((recent2_K - recent_K.square()).clamp_min(0) / number_K.clamp_max(RECENT)).sqrt()
        return error_K
