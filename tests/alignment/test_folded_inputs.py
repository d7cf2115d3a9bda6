"""Models whose inputs have several rows for each example on one axis, such as the patches of all images of a batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inloop import InLoop, MixturePolicy, capture
from inloop.errors import BatchSizeError, InloopError
from tests.alignment.architectures import D, N
from tests.alignment.exactness import assert_exact

PATCHES = 6

pytestmark = pytest.mark.usefixtures("double_precision")


class Tower(nn.Module):
    """Patches of all images on the first axis, [N * PATCHES, D]; those of an image attend to each other."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(D, D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.positions = nn.Embedding(4, D)

    def forward(self, patches, grid):
        """``grid``: for each image its rows and columns of patches, [N, 2]."""
        count = len(grid)
        hidden = self.embed(patches) + self.places(grid).view(-1, D)
        q, k, v = self.qkv(hidden).view(count, -1, 3 * D).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.reshape(-1, D))

    def places(self, grid):
        """Positions interpolated from a small table, [1, D, N * PATCHES, 1]."""
        table = self.positions.weight.view(1, 2, 2, D).permute(0, 3, 1, 2)
        each = torch.linspace(-1, 1, PATCHES) / grid.sum(dim=1, keepdim=True)
        points = torch.stack([each, -each], dim=-1).view(1, -1, 1, 2)
        return F.grid_sample(table, points, align_corners=False).permute(0, 2, 3, 1)


class TextAndImages(nn.Module):
    """The first input is the text, so it counts the examples; patches have no axis of their own for them."""

    def __init__(self):
        super().__init__()
        self.words, self.tower, self.head = nn.Embedding(5, D), Tower(), nn.Linear(D, 3)

    def forward(self, ids, patches, grid):
        images = self.tower(patches, grid).view(len(ids), PATCHES, D)
        return self.head(torch.cat([self.words(ids), images], dim=1))


def images(num=N):
    return torch.randn(num * PATCHES, D), torch.tensor([[2, 3]]).expand(num, 2).clone()


def of_image(model):
    patches, grid = images()
    return lambda tower: tower(patches, grid).view(N, PATCHES, D)


def test_the_number_of_examples_can_be_told():
    model = Tower()
    assert_exact(model, forward=of_image(model), num_examples=N)


def test_the_text_counts_the_examples():
    assert_exact(TextAndImages(), torch.randint(5, (N, 4)), *images())


def test_a_learner_tells_the_number_by_itself():
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    learner = InLoop(model, MixturePolicy(2), optimizer=optimizer)
    for num in (N, 1, N, N + 1):
        learner.sample(num)
        loss = model(*images(num)).square().mean()
        loss.backward()
        report = learner.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert report.dropped is None


class Views(nn.Module):
    """Rows do not depend on each other, so nothing shows which of them belong together."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, views, labels):
        return self.layer(views), labels


def test_rows_that_may_be_ordered_in_two_ways_are_refused():
    model = Views()
    learner = InLoop(model, MixturePolicy(2))
    learner.sample(N)
    out, _ = model(torch.randn(2 * N, D), torch.zeros(N))
    out.square().mean().backward()
    with pytest.raises(BatchSizeError, match=f"{N}"):
        learner.step(out.square().mean())


def test_patches_of_images_alone_are_refused_without_the_number():
    model = Tower()
    with pytest.raises(InloopError, match="num_examples="), capture(model):
        model(*images()).square().mean().backward()


class ManyExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts = nn.Linear(D, D), Batched()

    def forward(self, x):
        flat = self.first(x).view(-1, D).repeat(3, 1)
        return self.experts(flat).view(3, *x.shape).sum(0)


class Batched(nn.Module):
    """Owns its parameters, so it is run again as a whole; its output has rows of experts, examples and positions on one axis."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, D, D))

    def forward(self, flat):
        return torch.bmm(flat.view(3, -1, D), self.weight).tanh().view(-1, D)


def test_experts_that_all_see_all_examples():
    assert_exact(ManyExperts(), torch.randn(N, 4, D))


class TwoViews(nn.Module):
    """One layer for six rows of each example, and then for two of them."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, rows):
        six = self.layer(rows.flatten(0, 1)).tanh().view(N, 6, D)
        two = self.layer(six[:, :2].flatten(0, 1)).view(N, 2, D)
        return self.head(six.sum(1) + two.sum(1))


def test_a_layer_that_is_called_with_several_numbers_of_rows_for_each_example(caplog):
    """Six rows might be in two or three groups; two cannot be in three."""
    assert_exact(TwoViews(), torch.randn(N, 6, D))
    assert "could not find out" not in caplog.text


class TellsPlaces(TextAndImages):
    """Its output has whole numbers, too."""

    def forward(self, ids, patches, grid):
        return {"logits": super().forward(ids, patches, grid), "places": ids.argsort(), "is_long": ids > 2}


def test_an_output_of_whole_numbers_is_no_hindrance(caplog):
    ids = torch.randint(5, (N, 4))
    assert_exact(TellsPlaces(), forward=lambda model: model(ids, *images())["logits"])
    assert "could not find out" not in caplog.text
