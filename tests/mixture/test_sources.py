"""Selection within a source: with replacement, by shuffled passes, or in a stream's own order; and what resumes."""

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from inloop import Mixture
from inloop.errors import UsageError


def numbered(start, n):
    return (torch.arange(start, start + n),)


def all_of(source, n):
    return torch.full((n,), source)


class Stream(IterableDataset):
    def __init__(self, n, start=100):
        self.n, self.start = n, start

    def __iter__(self):
        return iter(range(self.start, self.start + self.n))


def test_a_pass_has_every_example_once_and_passes_differ():
    mixture = Mixture([numbered(0, 7), numbered(100, 5)], selection="passes")
    (first,), (second,) = mixture.draw(all_of(0, 7)), mixture.draw(all_of(0, 7))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(7))
    assert first.tolist() != second.tolist()
    (across,) = mixture.draw(all_of(0, 17))  # over the ends of passes, in one batch
    assert torch.bincount(across).min() >= 2
    (other,) = mixture.draw(all_of(1, 5))
    assert sorted(other.tolist()) == list(range(100, 105))


def test_effective_epochs_count_what_was_drawn():
    mixture = Mixture([numbered(0, 10), numbered(0, 20)])
    mixture.draw(torch.tensor([0] * 5 + [1] * 30))
    assert mixture.effective_epochs().tolist() == [0.5, 1.5]


@pytest.mark.parametrize("selection", ["replacement", "passes"])
def test_a_continued_mixture_draws_the_same(selection):
    sources = [numbered(0, 7), numbered(100, 5)]
    mixture = Mixture(sources, selection=selection)
    actions = torch.randint(0, 2, (6, 9))
    for batch in actions[:3]:
        mixture.draw(batch)
    state = mixture.state_dict()
    expected = [mixture.draw(batch)[0].tolist() for batch in actions[3:]]
    torch.manual_seed(99)
    continued = Mixture(sources, selection=selection)
    continued.draw(actions[0])
    continued.load_state_dict(state)
    assert [continued.draw(batch)[0].tolist() for batch in actions[3:]] == expected
    assert torch.equal(continued.drawn_K, mixture.drawn_K)
    with pytest.raises(UsageError, match="of a mixture of 2 sources; this one has 3"):
        Mixture([*sources, numbered(0, 3)]).load_state_dict(state)


def test_streams_are_read_in_order_and_begun_anew():
    mixture = Mixture([Stream(3), [1, 2]])
    drawn = mixture.draw(torch.tensor([0, 1, 0, 0, 0]))
    assert drawn[[0, 2, 3, 4]].tolist() == [100, 101, 102, 100]
    assert mixture.effective_epochs()[0] == pytest.approx(4 / 3)
    fresh = Mixture([Stream(3), [1, 2]])
    assert fresh.effective_epochs()[0].isnan()  # its size is not known yet
    with pytest.raises(UsageError, match="stream of source 0 is empty"):
        Mixture([Stream(0), [1, 2]]).draw(torch.tensor([0]))


def test_a_continued_stream_goes_on_where_it_was():
    mixture = Mixture([Stream(5), Stream(3, start=0)])
    for _ in range(2):
        mixture.draw(torch.tensor([0, 1, 0]))
    state = mixture.state_dict()
    expected = mixture.draw(torch.tensor([0, 1, 0, 0])).tolist()
    continued = Mixture([Stream(5), Stream(3, start=0)])
    continued.load_state_dict(state)
    assert continued.draw(torch.tensor([0, 1, 0, 0])).tolist() == expected


def test_passes_follow_the_generator_that_was_given():
    def order(torch_seed, generator_seed):
        torch.manual_seed(torch_seed)
        generator = torch.Generator().manual_seed(generator_seed)
        return (
            Mixture([numbered(0, 9), numbered(0, 9)], selection="passes", generator=generator)
            .draw(all_of(0, 9))[0]
            .tolist()
        )

    assert order(0, 1) == order(5, 1)
    assert order(0, 1) != order(0, 2)


class Transforming(TensorDataset):
    def __getitem__(self, index):
        return (super().__getitem__(index)[0] * 0 - 1,)


def test_what_a_dataset_or_a_collate_does_is_not_passed_by():
    (drawn,) = Mixture([Transforming(torch.arange(5)), Transforming(torch.arange(5))]).draw(torch.tensor([0, 1]))
    assert drawn.tolist() == [-1, -1]
    assert Mixture([numbered(0, 3), numbered(0, 3)], collate=len).draw(torch.tensor([0, 1, 1])) == 3
    tokens = [[1, 2, 3], [4, 5]]
    assert (
        Mixture([tokens, tokens], collate=list).draw(torch.tensor([0]))[0] in tokens
    )  # as they are, for one's own collate


def test_what_can_be_read_only_once_or_read_in_two_ways_is_refused():
    with pytest.raises(UsageError, match="Source 0 is a range_iterator, which can be read only once"):
        Mixture([iter(range(5)), [1, 2]])
    with pytest.raises(UsageError, match="Source 1 is a list of tensors, which may mean columns or examples"):
        Mixture([numbered(0, 3), [torch.zeros(2), torch.zeros(2)]])


def test_an_unknown_selection_is_named():
    with pytest.raises(UsageError, match="selection='random': allowed are 'replacement' and 'passes'"):
        Mixture([numbered(0, 3), numbered(0, 3)], selection="random")
