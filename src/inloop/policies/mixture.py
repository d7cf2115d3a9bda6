"""The mixture policy: which source each example comes from. Axes: N examples, K sources."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.errors import UsageError
from inloop.policies.discrete import Discrete
from inloop.policies.sources import SourceInfo, Sources


class MixturePolicy(Discrete):
    """A learned distribution over data sources, in one of three forms.

    "bounded": ``p_i ∝ prior_i exp(b(s_i))`` with b(s) = s below 0, and above it ``log 2 tanh(s / log 2)``: any number of sources can be
    dropped, and none can have more than twice its prior's odds.

    "inverted": the paper's inverted softmax, ``p_i = (1 - softmax(s)_i) / (K - 1)``: no source can get more than ``1 / (K - 1)``, and
    the one with the highest score loses. (A plain softmax tends to a single winner.) It is computed as

        log p_i = logsumexp_{j≠i} s_j - logsumexp_j s_j - log(K - 1),

    which keeps its precision when p_i is small. It can drop one source.

    "softmax": ``p_i ∝ prior_i exp(s_i)``.

    Args:
        num_sources: K, at least 2; or a :class:`~inloop.Mixture`, which has their names, sizes and labels.
        form: "bounded", "inverted" (the paper's) or "softmax".
        prior: The shares to begin with, and to be anchored at, in the order of the sources or by their names; by default all sources alike. Not with
            the inverted form.
        floor: The least share ε of each source, one number or one for each: ``(1 - sum ε) p + ε``.
        ceiling: The largest share of each source, one number or one for each; the excess goes to the others in
            proportion.

    Example:
        >>> MixturePolicy(num_sources=4).probabilities()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        num_sources: int | Sources,
        form: Literal["bounded", "inverted", "softmax"] = "bounded",
        prior: Sequence[float] | Mapping[str, float] | None = None,
        floor: float | Sequence[float] | Mapping[str, float] = 0.0,
        ceiling: float | Sequence[float] | Mapping[str, float] = 1.0,
    ) -> None:
        sources = SourceInfo.of(num_sources)
        num_sources = len(sources)
        if form not in ("bounded", "inverted", "softmax"):
            raise UsageError(f"form={form!r}: allowed are 'bounded', 'inverted' and 'softmax'.")
        floor_K, ceiling_K = _shares("floor", floor, sources), _shares("ceiling", ceiling, sources)
        if min(floor_K) < 0 or sum(floor_K) >= 1:
            least = 1 / num_sources
            raise UsageError(
                f"floor={floor}: shares must be at least 0 and add up to less than 1 (below {least:.4g} each)."
            )
        if any(low >= high for low, high in zip(floor_K, ceiling_K, strict=True)) or sum(ceiling_K) < 1 - 1e-9:
            raise UsageError(f"ceiling={ceiling}: each must be above its floor, and they must add up to 1 or more.")
        super().__init__(num_sources)
        self.form = form
        self.register_buffer("floor_K", torch.tensor(floor_K, device="cpu"), persistent=False)
        self.register_buffer("ceiling_K", torch.tensor(ceiling_K, device="cpu"), persistent=False)
        self.limited = max(floor_K) > 0 or min(ceiling_K) < 1
        self.register_buffer("log_prior_K", _log_prior(prior, sources, form), persistent=False)
        self.sources = sources
        self.alternatives = frozenset() if form == "inverted" else frozenset({"scores"})
        self.scores = nn.Parameter(torch.zeros(num_sources, device="cpu"))

    log_prior_K: Tensor
    floor_K: Tensor
    ceiling_K: Tensor

    def log_probabilities(self) -> Tensor:
        if self.form == "inverted":
            log_p_K = log_inverted_softmax(self.scores)
        else:
            weights_K = bounded(self.scores) if self.form == "bounded" else self.scores
            log_p_K = F.log_softmax(self.log_prior_K.to(weights_K) + weights_K, dim=0)
        if not self.limited:
            return log_p_K
        floor_K, ceiling_K = self.floor_K.to(log_p_K), self.ceiling_K.to(log_p_K)
        least_K = floor_K.log().clamp_min(-1e4)  # finite, for the gradient of a source with prior and floor zero
        return cap(torch.logaddexp(log_p_K.clamp_min(-1e4) + (1 - floor_K.sum()).log(), least_K), ceiling_K.log())

    def neutral(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """All sources alike, but for those with prior zero."""
        allowed_K = self.log_prior_K.isfinite()
        if bool(allowed_K.all()):
            return super().neutral(n, generator)
        return (
            allowed_K.float().multinomial(n, replacement=True, generator=generator)
            if n
            else torch.zeros(0, device="cpu").long()
        )


def bounded(scores_K: Tensor) -> Tensor:
    """The scores themselves below 0; above it they tend to log 2."""
    most = math.log(2)
    return torch.where(scores_K < 0, scores_K, most * torch.tanh(scores_K / most))


def _log_prior(prior: Sequence[float] | Mapping[str, float] | None, sources: SourceInfo, form: str) -> Tensor:
    num_sources = len(sources)
    if prior is None:
        return torch.zeros(num_sources, device="cpu")
    if form == "inverted":
        raise UsageError("prior=: the inverted form has none. Fix: form='bounded'.")
    if isinstance(prior, Mapping):
        prior = sources.in_order("prior", prior)
    if len(prior) != num_sources or min(prior) < 0 or not sum(prior) > 0:
        raise UsageError(
            f"prior={list(prior)}: give one number for each of the {num_sources} sources, none below 0 and not all 0."
        )
    return torch.tensor([float(share) for share in prior], device="cpu").log()


def cap(log_p_K: Tensor, log_ceiling_K: Tensor) -> Tensor:
    """Bring shares down to their ceilings and give the excess to the others in proportion, until all hold.

    A share at its ceiling keeps the gradient that it would have without the ceiling. Else a source that turns bad there could
    never come down by its own rewards.
    """
    full_K = torch.zeros_like(log_p_K, dtype=torch.bool)
    shared_K = log_p_K
    while bool((over_K := (shared_K > log_ceiling_K + 1e-6) & ~full_K).any()):
        full_K = full_K | over_K
        free = (1 - log_ceiling_K[full_K].exp().sum()).clamp_min(1e-12).log()
        shared_K = log_p_K + free - log_p_K[~full_K].logsumexp(dim=0) if not bool(full_K.all()) else log_ceiling_K
    at_ceiling_K = log_ceiling_K + log_p_K - log_p_K.detach()
    return torch.where(full_K, at_ceiling_K, shared_K)


def _shares(name: str, value: float | Sequence[float] | Mapping[str, float], sources: SourceInfo) -> list[float]:
    num_sources = len(sources)
    if isinstance(value, Mapping):
        value = sources.in_order(name, value)
    shares = [float(value)] * num_sources if isinstance(value, (int, float)) else [float(v) for v in value]
    if len(shares) != num_sources:
        raise UsageError(f"{name}={value}: give one number, or one for each of the {num_sources} sources.")
    return shares


def log_inverted_softmax(scores_K: Tensor) -> Tensor:
    """``log((1 - softmax(s)) / (K - 1))`` in O(K), without the cancellation.

    Of all scores but the largest, s_j <= max, ``1 - softmax(s)_j`` is at least a half and log1p keeps its precision; for the largest
    it is ``sum_{j≠i} exp(s_j) / sum_j exp(s_j)``, a quotient of two sums of positive terms.
    """
    log_p_K = F.log_softmax(scores_K, dim=0)
    largest = torch.zeros_like(scores_K, dtype=torch.bool)
    largest[scores_K.detach().argmax()] = True
    others = scores_K[~largest].logsumexp(dim=0) - scores_K.logsumexp(dim=0)
    # The probability of the largest is exchanged before log1p: its derivative there may be infinite, and 0 * inf is nan.
    rest_K = torch.log1p(-torch.where(largest, 0.0, log_p_K.exp()))
    return torch.where(largest, others, rest_K) - math.log(len(scores_K) - 1)
