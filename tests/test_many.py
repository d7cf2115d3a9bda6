"""Small tensors that are put into one have the numbers and shapes that they would have one by one."""

import pytest
import torch

from inloop.many import are_small, joined, together


def halves_and_roots(numbers, others):
    halves = torch._foreach_mul(numbers, 0.5)
    torch._foreach_add_(halves, torch._foreach_sqrt(others))
    return halves


def columns(dtype=torch.float32):
    shapes = ((3, 4), (), (5,), (0,), (2, 3, 4, 4))
    numbers, others = ([torch.rand(shape, dtype=dtype) for shape in shapes] for _ in range(2))
    numbers[-1] = numbers[-1].to(memory_format=torch.channels_last)  # in another order than its fellow
    return numbers, others


def test_the_numbers_are_the_same():
    numbers, others = columns()
    assert are_small(numbers)
    expected = halves_and_roots(numbers, others)
    found = together(halves_and_roots, numbers, others)
    assert all(map(torch.equal, found, expected))
    assert [each.shape for each in found] == [each.shape for each in numbers]


def test_an_operation_is_done_once():
    calls = []

    def count(numbers):
        calls.append(len(numbers))
        return torch._foreach_mul(numbers, 2.0)

    numbers, _ = columns()
    together(count, numbers)
    together(count, numbers[:1])
    assert calls == [1, 1]
    large = [torch.rand(1 << 15) for _ in range(3)]
    together(count, large)
    assert calls == [1, 1, 3]


@pytest.mark.parametrize(
    "mixed",
    [
        [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        [torch.zeros(2), torch.nn.Parameter(torch.zeros(2))],
        [torch.zeros(2), torch.zeros(2, device="meta")],
        [torch.zeros(2), 1.0],
    ],
)
def test_tensors_of_several_kinds_stay_apart(mixed):
    assert not are_small(mixed)


def test_joined_keeps_the_order_of_rows():
    assert joined([torch.arange(4).view(2, 2).t(), torch.tensor(7)]).tolist() == [0, 2, 1, 3, 7]


def test_sparse_tensors_are_not_put_into_one():
    assert not are_small([torch.eye(3).to_sparse()] * 2)
