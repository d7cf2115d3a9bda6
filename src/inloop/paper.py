"""The settings of the paper, all of them together, whatever the defaults become."""

from typing import Any

from inloop.policies import MixturePolicy
from inloop.updates import Reinforce


def paper_settings(accumulate: int = 10) -> dict[str, Any]:
    """The options of a learner as in the paper: ``InLoop(model, paper_policy(K), **paper_settings())``.

    Gradient alignment with the next step's gradient as it is, rewards normalised within the step, REINFORCE with Adam(0.1).

    Args:
        accumulate: Rewarded steps for each update of the policy: 10 for sources, 1 for augmentation.
    """
    return {
        "optimizer": False,
        "reward": "gar",
        "reference": "next",
        "update": Reinforce(accumulate=accumulate),
    }


def paper_policy(num_sources: int) -> MixturePolicy:
    """The paper's distribution over sources: the inverted softmax, which can drop one source."""
    return MixturePolicy(num_sources, form="inverted")
