"""Contributions of many calls, added up with few kernels, against one by one."""

import pytest
import torch

from inloop.alignment import sizes
from inloop.alignment.groups import Group, groups_of
from inloop.alignment.sums import Dot, Sums
from inloop_lab.bench.overhead import KernelCount

N = 5
SHAPES = [(N, 3), (N, 4, 2), (N, 7), (N, 2, 3, 4), (N,)]


def products(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator).to(dtype) for _ in range(2)] for shape in shapes]


def one_by_one(pairs):
    return sum((a.double() * b.double()).reshape(N, -1).sum(dim=1) for a, b in pairs)


def added(pairs, *rows):
    sums = Sums()
    for dout, out in pairs:
        sums.add(Dot(dout, out))
    for each in rows:
        sums.add(each)
    return sums


@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_products_are_summed_whatever_their_size(limit, monkeypatch):
    monkeypatch.setattr(sizes, "SMALL_PRODUCT", limit)
    monkeypatch.setattr(sizes, "PRODUCTS", {"cpu": limit, "other": limit})
    rows_N = torch.arange(float(N), dtype=torch.float64)
    torch.testing.assert_close(added(products(), rows_N).total(), one_by_one(products()) + rows_N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    pairs = products(dtype)
    total_N = added(pairs).total()
    assert total_N.dtype == torch.float32
    torch.testing.assert_close(total_N.double(), one_by_one(pairs), rtol=1e-5, atol=1e-5)


def test_kinds_may_be_mixed():
    pairs = [*products(torch.float32), *products(torch.float64), *products(torch.bfloat16)]
    torch.testing.assert_close(added(pairs).total(), one_by_one(pairs), rtol=1e-5, atol=1e-5)


def test_other_axes_and_magnitudes_are_computed_by_themselves():
    (a, b), *_ = products(shapes=[(4, N, 3)])
    sums = Sums()
    sums.add(Dot(a, b, batch_axis=1))
    sums.add(Dot(a, b, batch_axis=1, absolute=True))
    torch.testing.assert_close(sums.total(), (a * b).sum(dim=(0, 2)) + (a * b).abs().sum(dim=(0, 2)))


def test_inputs_keep_their_values():
    pairs = products()
    added(pairs).total()
    torch.testing.assert_close(pairs, products(), rtol=0, atol=0)


def test_a_copy_is_added_to_alone():
    sums = added(products())
    other = sums.copy()
    other.add(torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(sums.total(), one_by_one(products()))
    torch.testing.assert_close(other.total(), one_by_one(products()) + 1)


def test_many_small_products_take_three_kernels():
    pairs = products(shapes=[(N, 3)] * 50)
    with KernelCount() as count:
        added(pairs).total()
    assert dict(count.names) == {"_foreach_mul": 1, "cat": 1, "sum": 1}


class Call:
    """What a group asks of a call."""

    device = torch.device("cpu")

    def __init__(self, name, size):
        self.parameter_names, self.size = {"weight": name}, size

    @property
    def nbytes(self):
        return self.size


def test_groups_end_at_their_size_and_count_shared_parameters_once(monkeypatch):
    monkeypatch.setattr(sizes, "GROUP", {"cpu": 100, "other": 0})
    sizes_of = {"a": 60, "b": 90}
    calls = [Call("a", 10), Call("a", 10), Call("b", 5), Call("b", 5), Call("b", 20)]
    assert [len(group) for group in groups_of(calls, sizes_of)] == [3, 2]
    group = Group(sizes_of)
    assert not group.add(calls[0])
    assert group.take() == calls[:1]
    assert group.take() == []
