"""A mixture loads the states of such mixtures, and says of others what is wrong."""

import pytest
import torch

from inloop import InLoop, Mixture, MixturePolicy
from inloop.errors import UsageError


def mixture_of(sizes, **options):
    return Mixture([(torch.arange(size),) for size in sizes], **options)


@pytest.mark.parametrize("state", [None, {}, {"sources": []}, 3])
def test_what_is_no_state_is_refused(state):
    mixture = mixture_of([4, 4])
    learner = InLoop(torch.nn.Linear(1, 1), MixturePolicy(mixture))
    with pytest.raises(UsageError, match="no state of a Mixture"):
        mixture.load_state_dict(state)
    with pytest.raises(UsageError, match="no state of a MixtureLoader"):
        mixture.loader(learner, 2).load_state_dict(state)


def test_passes_over_larger_sources_are_not_continued():
    """This ran for ever: the position was behind the end of the pass."""
    larger = mixture_of([40, 40], selection="passes")
    larger.draw(torch.zeros(39, dtype=torch.long))
    smaller = mixture_of([10, 10], selection="passes")
    with pytest.raises(UsageError, match="39 examples into a pass over 40 examples of source 0, which has 10 now"):
        smaller.load_state_dict(larger.state_dict())
    assert len(smaller.draw(torch.zeros(3, dtype=torch.long))[0]) == 3


def test_with_replacement_sources_may_have_grown():
    before, after = mixture_of([4, 4]), mixture_of([4, 6])
    after.load_state_dict(before.state_dict())


@pytest.mark.parametrize(("entry", "value"), [("position", "x"), ("position", -1), ("seed", None), ("num_passes", 1.5)])
def test_damaged_numbers_are_named(entry, value):
    mixture = mixture_of([4, 4], selection="passes")
    state = mixture.state_dict()
    state["sources"][1][entry] = value
    with pytest.raises(UsageError, match=f"source 1.{entry}"):
        mixture.load_state_dict(state)
