"""Whether a layer that is known by its class name alone is what its rule takes it for: tried with numbers.

Hugging Face has two hundred RMSNorms. Nearly all scale what they have normalised, which is affine in the weight. One scales first.
"""

import torch
from torch import Tensor, nn

from inloop.alignment.call import make_twin

_TOLERANCE = 1e-4  # of the largest value: the layer may compute in float32


@torch.no_grad()
def is_affine_in_its_weight(layer: nn.Module, is_linear: bool) -> bool:
    """Whether ``f(x; a + b) = f(x; a) + f(x; b) - f(x; 0)``, of a layer that has one parameter, the size of its input.

    Args:
        is_linear: Whether also ``f(x; 0) = 0``.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator("cpu").manual_seed(0)
    x, a, b = (torch.randn(n, *weight.shape, generator=generator, dtype=torch.float64, device="cpu") for n in (3, 1, 1))

    def f(value: Tensor) -> Tensor:
        out = make_twin(layer, {"weight": value[0]}).forward(x)
        assert isinstance(out, Tensor)
        return out

    try:
        together, apart, zero = f(a + b), f(a) + f(b), f(torch.zeros_like(a))
    except Exception:  # a user's layer may raise anything; it is run again, which is exact for every layer
        return False
    expected = apart if is_linear else apart - zero
    return bool((together - expected).abs().max() <= _TOLERANCE * together.abs().max())
