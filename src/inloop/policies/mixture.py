"""The mixture policy: which source each example comes from. Axes: N examples, K sources."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.policies.discrete import Discrete


class MixturePolicy(Discrete):
    """A learned distribution over data sources.

    The paper's inverted softmax, ``p_i = (1 - softmax(s)_i) / (K - 1)``: no source can win more than ``1 / (K - 1)``, and
    the one with the highest score loses. (A plain softmax tends to a single winner.) It is computed as

        log p_i = logsumexp_{j≠i} s_j - logsumexp_j s_j - log(K - 1),

    which keeps its precision when p_i is small.

    Args:
        num_sources: K, at least 2.
        form: "inverted" (the paper) or "softmax".
        floor: A probability ε that no source falls below: ``(1 - K ε) p + ε``.

    Example:
        >>> MixturePolicy(num_sources=4).probabilities()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, num_sources: int, form: Literal["inverted", "softmax"] = "inverted", floor: float = 0.0) -> None:
        if not isinstance(num_sources, int) or num_sources < 2:
            raise UsageError(
                f"num_sources={num_sources}: a mixture needs at least 2 sources, with one there is nothing to learn."
            )
        if form not in ("inverted", "softmax"):
            raise UsageError(f"form={form!r}: allowed are 'inverted' and 'softmax'.")
        if not 0 <= floor < 1 / num_sources:
            raise UsageError(f"floor={floor}: allowed is 0 <= floor < 1 / num_sources = {1 / num_sources:.4g}.")
        super().__init__(num_sources)
        self.form = form
        self.floor = floor
        self.scores = nn.Parameter(torch.zeros(num_sources))

    def log_probabilities(self) -> Tensor:
        log_p_K = log_inverted_softmax(self.scores) if self.form == "inverted" else F.log_softmax(self.scores, dim=0)
        if self.floor == 0:
            return log_p_K
        return ((1 - self.num_choices * self.floor) * log_p_K.exp() + self.floor).log()


def log_inverted_softmax(scores_K: Tensor) -> Tensor:
    """``log((1 - softmax(s)) / (K - 1))`` without the cancellation."""
    num_choices = len(scores_K)
    others_KK = scores_K.expand(num_choices, num_choices).masked_fill(
        torch.eye(num_choices, dtype=torch.bool, device=scores_K.device), -torch.inf
    )
    return others_KK.logsumexp(dim=1) - scores_K.logsumexp(dim=0) - math.log(num_choices - 1)
