"""The learned augmentation policy: the paper's Algorithm 2.

    r   ~ softmax(l_r)                              how many operations, of 1..4
    a_i ~ uniform, without replacement              which, in order, i = 1..r
    d_i ~ Bernoulli(sigmoid(l_d[a_i]))              whether it is kept
    k_i ~ softmax(l_a[a_i])     if d_i              how strong, of 0..30

    log p = log p(r) + log p(a_1..a_r) + sum_i log p(d_i | a_i) + sum_{i kept} log p(k_i | a_i)

Axes: N examples, R the most operations in a row, A operations of the space, S strengths.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inloop.augment.records import draw_operations, make_record
from inloop.augment.registry import STRENGTHS, get_operation
from inloop.augment.spaces import Space, get_space
from inloop.errors import UsageError
from inloop.policies import Actions, Policy, RewardSummary
from inloop.policies.policy import summarise_by_choice


class AugmentPolicy(Policy):
    """Learns which operations to keep, how strong, and how many in a row. It stays on the CPU, wherever the images are.

    Args:
        space: The operations, by name of a space or from :func:`~inloop.augment.make_space`.
        numbers: The allowed numbers of operations in a row; by default 1 to 4, at most as many as the space has.
        replacement: Draw an example's operations with replacement, as the authors' code does; the paper draws without.

    Example:
        >>> policy = AugmentPolicy("ra")
        >>> images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        >>> from inloop.augment import apply
        >>> apply(images, policy.sample(8)).shape
        torch.Size([8, 3, 32, 32])
    """

    def __init__(
        self, space: str | Space = "wl", numbers: Sequence[int] | None = None, replacement: bool = False
    ) -> None:
        super().__init__()
        self.space = get_space(space)
        num_operations = len(self.space)
        if numbers is None:
            numbers = tuple(range(1, 1 + min(4, num_operations)))
        numbers = tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)
        whole = all(isinstance(r, int) and r >= 1 for r in numbers)
        if (
            not whole
            or not numbers
            or len(set(numbers)) < len(numbers)
            or (max(numbers) > num_operations and not replacement)
        ):
            most = "" if replacement else f" to {num_operations}, as many as the space has operations"
            raise UsageError(f"numbers={numbers}: give different whole numbers from 1{most}.")
        self.replacement = replacement
        self.register_buffer("numbers", torch.tensor(list(numbers), device="cpu"), persistent=False)
        self.alternatives = frozenset({"number_logits", "strength_logits"})
        self.number_logits = nn.Parameter(torch.zeros(len(numbers), device="cpu"))
        self.keep_logits = nn.Parameter(torch.zeros(num_operations, device="cpu"))
        self.strength_logits = nn.Parameter(torch.zeros(num_operations, STRENGTHS, device="cpu"))
        # The meaning of the logits: a state with another meaning is refused.
        codes = [get_operation(name).code for name in self.space.operations]
        magnitudes = [m for name in self.space.operations for m in self.space.magnitudes[name]]
        self.register_buffer(
            "meaning", torch.tensor([*numbers, *codes, *magnitudes], dtype=torch.float64, device="cpu")
        )

    numbers: Tensor
    meaning: Tensor

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        found = state_dict.get(f"{prefix}meaning")
        if found is not None and found.tolist() != self.meaning.tolist():
            raise UsageError(
                f"This state is of an AugmentPolicy with another space or other numbers than '{self.space.name}' "
                f"({', '.join(self.space.operations)}) and {tuple(self.numbers.tolist())}. Fix: make the policy as it was when the state was saved."
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> dict[str, Actions]:
        if n == 0:
            return self.neutral(0, generator)
        number_N = torch.multinomial(self.number_logits.softmax(0), n, replacement=True, generator=generator)
        most = int(self.numbers.max())
        choice_NR = draw_operations(n, most, len(self.space), self.replacement, generator)
        keep_NR = torch.rand(n, most, generator=generator, device="cpu") < self.keep_logits.sigmoid()[choice_NR]
        p_MS = self.strength_logits.softmax(1)[choice_NR.flatten()]
        strength_NR = torch.multinomial(p_MS, 1, generator=generator).view(n, most)
        return self._actions(number_N, choice_NR, keep_NR, strength_NR, generator)

    def neutral(self, n: int, generator: torch.Generator | None = None) -> dict[str, Actions]:
        """No operation."""
        none_NR = torch.zeros(n, int(self.numbers.max()), dtype=torch.long, device="cpu")
        number_N = torch.zeros(n, dtype=torch.long, device="cpu")
        return self._actions(number_N, none_NR, none_NR.bool(), none_NR, generator)

    def _actions(
        self,
        number_N: Tensor,
        choice_NR: Tensor,
        keep_NR: Tensor,
        strength_NR: Tensor,
        generator: torch.Generator | None,
    ) -> dict[str, Actions]:
        drawn = {"number": number_N, "choice": choice_NR, "keep": keep_NR, "strength": strength_NR}
        done_NR = keep_NR & self._is_used(number_N, choice_NR)
        return {**drawn, **make_record(self.space, choice_NR, strength_NR, done_NR, generator)}

    def _is_used(self, number_N: Tensor, choice_NR: Tensor) -> Tensor:
        """[N, R]: whether the r-th place is among the first ``numbers[number]``."""
        return torch.arange(choice_NR.shape[1], device="cpu") < self.numbers[number_N].unsqueeze(1)

    def log_prob(self, actions: Actions) -> Tensor:
        number_N, choice_NR, keep_NR, strength_NR = self._drawn(actions)
        used_NR = self._is_used(number_N, choice_NR)
        keep_logit_NR = self.keep_logits[choice_NR]
        log_keep_NR = F.logsigmoid(torch.where(keep_NR, keep_logit_NR, -keep_logit_NR))
        log_strength_NR = F.log_softmax(self.strength_logits, dim=1)[choice_NR, strength_NR]
        parts_NR = log_keep_NR + torch.where(keep_NR, log_strength_NR, 0.0)
        log_number_N = F.log_softmax(self.number_logits, dim=0)[number_N]
        return log_number_N + self._log_ordered_draw()[number_N] + (parts_NR * used_NR).sum(dim=1)

    def _log_ordered_draw(self) -> Tensor:
        """For each number r, the log-probability of one ordered draw of r operations."""
        a = len(self.space)
        log = [-sum(math.log(a if self.replacement else a - i) for i in range(r)) for r in self.numbers.tolist()]
        return torch.tensor(log, dtype=self.number_logits.dtype, device="cpu")

    def _drawn(self, actions: Actions) -> list[Tensor]:
        names = ("number", "choice", "keep", "strength")
        if not isinstance(actions, Mapping) or not set(names) <= set(actions):
            got = f"a dict with {sorted(actions)}" if isinstance(actions, Mapping) else type(actions).__name__
            raise UsageError(f"Actions of an AugmentPolicy are a dict with {', '.join(names)} and more; got {got}.")
        number_N, choice_NR, keep_NR, strength_NR = (cast(Tensor, actions[name]) for name in names)
        limits = (
            ("number", number_N, len(self.numbers)),
            ("choice", choice_NR, len(self.space)),
            ("strength", strength_NR, STRENGTHS),
        )
        for name, values, limit in limits:
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
                raise UsageError(
                    f"Actions have '{name}' from {int(values.min())} to {int(values.max())}; this policy has 0..{limit - 1}. Fix: give actions "
                    "that this policy sampled."
                )
        return [number_N, choice_NR, keep_NR.bool(), strength_NR]

    def extra_repr(self) -> str:
        return f"space={self.space.name!r}, {len(self.space)} operations, numbers={tuple(self.numbers.tolist())}"

    @torch.no_grad()
    def probabilities(self) -> dict[str, Tensor]:
        """Probabilities of the numbers [numbers], of keeping a drawn operation [A], and of its strengths [A, S].

        Operations are drawn uniformly. Where keeping makes no difference, as for the identity, the probability drifts.
        """
        return {
            "number": self.number_logits.softmax(0),
            "keep": self.keep_logits.sigmoid(),
            "strength": self.strength_logits.softmax(1),
        }

    def summarise(self, actions: Actions, rewards_N: Tensor) -> dict[str, object]:
        """Rewards by number, and by operation: where it was kept, and where it was drawn and dropped."""
        number_N, choice_NR, keep_NR, _ = self._drawn(actions)
        used_NR = self._is_used(number_N, choice_NR)
        rewards_NR = rewards_N.cpu().unsqueeze(1).expand(-1, choice_NR.shape[1])
        done_NR, dropped_NR = used_NR & keep_NR, used_NR & ~keep_NR

        def by_operation(where_NR: Tensor) -> RewardSummary:
            return summarise_by_choice(choice_NR[where_NR], len(self.space), rewards_NR[where_NR])

        return {
            "number": summarise_by_choice(number_N, len(self.numbers), rewards_N),
            "kept": by_operation(done_NR),
            "dropped": by_operation(dropped_NR),
        }
