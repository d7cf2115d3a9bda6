"""How a policy learns from rewards: the protocol of all update rules."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from inloop.errors import UsageError
from inloop.policies import Policy
from inloop.references import Next, Reference
from inloop.rewards import Reward
from inloop.step import Draw


class KnownSources(Protocol):
    """What a rule may ask about the sources, [K] each."""

    @property
    def labels_are_told(self) -> bool:
        """Whether logits and labels were told, which tell wrong sources from different ones."""

    def not_learning(self) -> Tensor:
        """Which sources certainly do not learn while most others do."""

    def stagnant(self) -> Tensor:
        """Which sources have not certainly learned anything yet, though most others have."""

    def surprising(self) -> Tensor:
        """Which sources have labels that certainly surprise the model."""


class Update(ABC):
    """Moves a policy. One object serves one learner, which attaches it.

    Attributes:
        policy: The policy that it moves.
        reference: What judges the examples.
        sources: What is known of the sources; None if the policy has none.
        version: How often the policy was changed.
    """

    policy: Policy
    reference: Reference
    sources: KnownSources | None = None

    def __init__(self) -> None:
        self.version = 0
        self._is_attached = False

    def attach(
        self,
        policy: Policy,
        reward: Reward,
        reference: Reference | None = None,
        sources: KnownSources | None = None,
    ) -> None:
        """A learner takes the rule, to move this policy by rewards that this reference judges."""
        if self._is_attached:
            raise UsageError(
                f"This {type(self).__name__} belongs to another learner already. Fix: make one for each learner."
            )
        self.version, self.policy, self.reference = 0, policy, reference or Next()
        self.sources = sources
        self.begin(policy, reward)
        self._is_attached = True

    def begin(self, policy: Policy, reward: Reward) -> None:  # noqa: B027  a rule may have nothing to begin with
        """Begin anew with this policy, and the reward that it learns from. Raises if the rule has no use for them."""

    def detach(self) -> None:
        """The learner is closed; another may attach it, which begins anew or loads a state."""
        self._is_attached = False

    @abstractmethod
    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        """Take in the rewards of one step; returns whether the policy was changed.

        Args:
            draws: The draws of the step, one for each micro-batch.
            rewards_N: The rewards of all processes' examples, in the order of the draws' ``rewarded``; all are finite.
        """

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.version = state["version"]


class NoUpdate(Update):
    """Never moves the policy: for looking at the rewards alone."""

    def add(self, draws: Sequence[Draw], rewards_N: Tensor) -> bool:
        return False
