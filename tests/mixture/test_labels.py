"""Reading the labels of sources leaves the training's random numbers alone."""

import random

import numpy as np
import torch

import inloop


class Augmented(torch.utils.data.Dataset):
    """Images with a random transform."""

    def __len__(self):
        return 20

    def __getitem__(self, row):
        noise = torch.rand(3) + random.random() + np.random.rand()  # noqa: NPY002
        return noise, row % 2


def test_reading_labels_uses_up_no_random_numbers():
    mixture = inloop.Mixture([Augmented(), Augmented()])
    drawn = []
    for reads in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        if reads:
            assert [counts.tolist() for counts in mixture.label_counts()] == [[10, 10]] * 2
        drawn.append((float(torch.rand(())), random.random(), np.random.rand()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
