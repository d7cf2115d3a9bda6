"""Whether a layer that is known by its class name alone is what its rule takes it for: tried with numbers.

Hugging Face has two hundred RMSNorms. Nearly all scale what they have normalised, which is affine in the weight. One scales first.
"""

import torch
from torch import Tensor, nn

from inloop.alignment.call import make_twin
from inloop.randomness import untouched_generators

_TOLERANCE = 1e-4  # of the largest value: the layer may compute in float32


@torch.no_grad()
def is_affine_in_its_weight(layer: nn.Module, is_linear: bool) -> bool:
    """Whether ``f(x; a + b) = f(x; a) + f(x; b) - f(x; 0)``, of a layer that has one parameter, the size of its input.

    It is tried with small weights and large ones, on inputs with and without positions.

    Args:
        is_linear: Whether also ``f(x; 0) = 0``.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    def holds(x: Tensor, a: Tensor, b: Tensor) -> bool:
        together, apart, zero = f(x, a + b), f(x, a) + f(x, b), f(x, torch.zeros_like(a))
        expected = apart if is_linear else apart - zero
        return bool((together - expected).abs().max() <= _TOLERANCE * together.abs().max())

    def f(x: Tensor, value: Tensor) -> Tensor:
        out = make_twin(layer, {"weight": value}).forward(x)
        assert isinstance(out, Tensor)
        return out

    inputs = (numbers(3, *weight.shape), numbers(2, 3, *weight.shape))
    try:
        with untouched_generators():
            return all(
                holds(x, size * numbers(*weight.shape), numbers(*weight.shape)) for x in inputs for size in (1, 100)
            )
    except Exception:  # a user's layer may raise anything; it is run again, which is exact for every layer
        return False
