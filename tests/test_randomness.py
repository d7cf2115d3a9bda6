"""Default generators: independent of each other, reproducible through torch's seed."""

import torch

from inloop.randomness import default_generator


def numbers(purpose, seed):
    torch.manual_seed(seed)
    return torch.rand(8, generator=default_generator(purpose))


def test_generators_follow_torchs_seed_and_their_purpose():
    assert torch.equal(numbers("actions", 0), numbers("actions", 0))
    assert not torch.equal(numbers("actions", 0), numbers("actions", 1))
    assert not torch.equal(numbers("actions", 0), numbers("sources", 0))  # one seed for both would tie them together


def test_asking_for_one_leaves_torchs_own_alone():
    before = torch.get_rng_state()
    default_generator("anything")
    assert torch.equal(torch.get_rng_state(), before)
