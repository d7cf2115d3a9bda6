"""Drawing from sources."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from inloop import Mixture
from inloop.errors import UsageError
from inloop.policies import Shares


class Squares(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.tensor([100.0 + index]), index**2


def test_each_example_comes_from_its_source_uniformly():
    sources = [
        (torch.arange(5.0)[:, None], torch.arange(5)),
        TensorDataset(50 + torch.arange(2.0)[:, None], torch.arange(2)),
        Squares(),
    ]
    mixture = Mixture(sources, generator=torch.Generator().manual_seed(0))
    actions = torch.arange(3).repeat(4000)
    x, y = mixture.draw(actions)
    assert x.shape == (12_000, 1)
    for source, values in enumerate([range(5), range(50, 52), range(100, 103)]):
        drawn, counts = x[actions == source].unique(return_counts=True)
        assert drawn.tolist() == list(values)
        assert (counts / 4000 - 1 / len(drawn)).abs().max() < 0.04
    assert torch.equal(y[actions == 2], (x[actions == 2, 0] - 100).long() ** 2)


def test_draws_come_from_the_generator_alone():
    source = (torch.arange(100.0),)
    actions = torch.zeros(50, dtype=torch.long)
    first, second = (
        Mixture([source, source], generator=torch.Generator().manual_seed(4)).draw(actions)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_actions_of_a_product_name_their_source():
    mixture = Mixture([(torch.zeros(2),), (torch.ones(2),)])
    (x,) = mixture.draw({"source": torch.tensor([1, 0]), "operation": torch.tensor([3, 3])})
    assert x.tolist() == [1.0, 0.0]


def test_sources_may_have_names():
    mixture = Mixture({"web": (torch.zeros(2),), "books": (torch.ones(2),)})
    (x,) = mixture.draw(torch.tensor([1, 0]))
    assert x.tolist() == [1.0, 0.0]
    assert mixture.names == ["web", "books"]
    assert Mixture([(torch.zeros(2),), (torch.ones(2),)]).names == ["0", "1"]
    with pytest.raises(UsageError, match="Source books is empty"):
        Mixture({"web": (torch.zeros(2),), "books": (torch.ones(0),)})


def test_tensors_are_not_copied():
    x = torch.zeros(4, 2)
    mixture = Mixture([(x,), (torch.ones(3, 2),)])
    x += 5
    (batch,) = mixture.draw(torch.tensor([1, 0, 1]))
    assert batch[:, 0].tolist() == [1.0, 5.0, 1.0]


def test_the_mixture_warns_of_a_policy_with_too_few_choices(caplog):
    mixture = Mixture({"web": (torch.zeros(4),), "books": (torch.ones(4),), "code": (torch.ones(4),)})
    for _ in range(5):
        mixture.draw(torch.tensor([0, 1] * 40))
    assert (
        caplog.text.count("none came from source code; there are 3 sources, and the policy seems to choose among 2")
        == 1
    )


def test_a_source_with_a_share_of_zero_is_no_alarm(caplog):
    """The oracle of the demo leaves out the first source, and means it."""
    mixture = Mixture([(torch.zeros(4),), (torch.ones(4),), (torch.ones(4),)])
    oracle = Shares([0.0, 1.0, 1.0])
    for _ in range(5):
        mixture.draw(oracle.sample(80))
    assert mixture.drawn_K[0] == 0
    assert caplog.text == ""


def test_entries_that_only_some_examples_have_are_not_left_out():
    mixture = Mixture([[{"x": 1.0}] * 3, [{"x": 1.0, "weight": 2.0}] * 3])
    for actions in ([0, 1], [1, 0]):
        with pytest.raises(UsageError, match="different entries"):
            mixture.draw(torch.tensor(actions))


class Named(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"name": f"example {index}", "label": index}


def test_examples_are_collated_as_by_a_dataloader():
    batch = Mixture([Named(), Named()]).draw(torch.tensor([0, 1, 1]))
    assert batch["name"] == [f"example {label}" for label in batch["label"]]
    lengths = Mixture([Named(), Named()], collate=len)
    assert lengths.draw(torch.tensor([0, 1, 1])) == 3


def test_an_error_of_a_collate_function_is_its_own():
    def collate(examples):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine$"):
        Mixture([Named(), Named()], collate=collate).draw(torch.tensor([0, 1]))


def test_bad_sources_and_actions_are_named():
    with pytest.raises(UsageError, match=r"Source 1 is a Tensor. Allowed are"):
        Mixture([(torch.zeros(2),), torch.zeros(2)])
    with pytest.raises(UsageError, match="Source 0 is a DataLoader, which gives batches. Fix: give its dataset"):
        Mixture([DataLoader(TensorDataset(torch.zeros(4)))] * 2)
    with pytest.raises(UsageError, match="got a ConcatDataset"):
        Mixture(TensorDataset(torch.zeros(4)) + TensorDataset(torch.zeros(4)))
    with pytest.raises(UsageError, match=r"different forms .*: \(a tensor \[2\]\) and \(a tensor \[3\]\)"):
        Mixture([(torch.zeros(4, 2),), (torch.zeros(4, 3),)]).draw(torch.tensor([0, 1]))
    with pytest.raises(UsageError, match=r"Source 1 is a tuple with NumPy arrays. Fix: give tensors"):
        Mixture([(torch.zeros(2),), (np.zeros((4, 2)), np.zeros(4))])
    with pytest.raises(UsageError, match="Source 0 is a dict. Allowed are"):
        Mixture([{"x": torch.zeros(2)}] * 2)
    with pytest.raises(UsageError, match="got a zip"):
        Mixture(zip([torch.zeros(2)], [torch.zeros(2)], strict=True))
    with pytest.raises(UsageError, match=r"different lengths: \[2, 3\]"):
        Mixture([(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2))])
    with pytest.raises(UsageError, match=r"dict with the entry 'source'; got \['operation'\]"):
        Mixture([(torch.zeros(2),), (torch.zeros(2),)]).draw({"operation": torch.zeros(2)})
    with pytest.raises(UsageError, match="at least 2 sources; got 1"):
        Mixture([(torch.zeros(2),)])
    with pytest.raises(UsageError, match=r"Source 1 is empty; every source needs at least one example"):
        Mixture([(torch.zeros(2),), (torch.zeros(0),)])
    with pytest.raises(UsageError, match="name sources 0 to 2; there are 0 to 1"):
        Mixture([(torch.zeros(2),), (torch.zeros(2),)]).draw(torch.tensor([0, 2]))
