"""Whose is a row? Compare the contributions of a few examples with brute force, on a twin of the model.

The twin runs forward as in the step, and its outputs get random gradients. The contribution of example i to the product
with a random direction is then also that of a backward pass with the gradients of its own rows of the outputs alone.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from inloop.alignment.call import Layouts
from inloop.alignment.inputs import Inputs, copied
from inloop.alignment.kept import tensors_in
from inloop.alignment.plan import Plan
from inloop.alignment.recorder import Recorder
from inloop.errors import InloopError

_NUM_EXAMPLES = 3


def agrees_with_brute_force(twin: nn.Module, part: str, plan: Plan, inputs: Inputs, layouts: Layouts, n: int) -> bool:
    """Whether the first of ``n`` examples have the contributions of brute force; also True if recording refuses the model by itself.

    Args:
        twin: A twin of the model; its parameters receive gradients.
        part: The name of the part that is called with these inputs.
    """
    sites = tuple(replace(site, module=twin.get_submodule(site.name)) for site in plan.sites)
    recorder = Recorder(twin, replace(plan, sites=sites), layouts=layouts)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            tape = recorder.start("sum")
            args, kwargs = copied(inputs)
            rows = [
                row
                for out in tensors_in(twin.get_submodule(part)(*args, **kwargs))
                if (row := _rows_first(out, n)) is not None
            ]
            weights = [_random_like(row, generator) for row in rows]
            if not rows:
                return False
            torch.autograd.backward(rows, weights, retain_graph=True)
            recorder.stop()
        named = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        direction = {name: _random_like(p, generator) for name, p in named.items()}
        found_N = tape.align(direction).double()
    except InloopError:
        return True
    finally:
        recorder.remove()
    if len(found_N) != n:
        return False
    expected = [_brute_force(rows, weights, named, direction, i) for i in range(min(n, _NUM_EXAMPLES))]
    worst = max(abs(float(found) - own) for found, own in zip(found_N, expected, strict=False))
    coarse = max(torch.finfo(row.dtype).eps for row in rows)
    return worst <= min(1e4 * coarse, 0.1) * max(map(abs, expected), default=0.0)


def _rows_first(out: Tensor, n: int) -> Tensor | None:
    """The output with examples on the first axis; None if it has none of them, or no gradient."""
    if not out.requires_grad or n not in out.shape[:2]:
        return None
    return out if out.shape[0] == n else out.transpose(0, 1)


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu").to(tensor)


def _brute_force(
    rows: list[Tensor], weights: list[Tensor], named: Mapping[str, Tensor], direction: Mapping[str, Tensor], i: int
) -> float:
    """The contribution of example ``i``, by a backward pass of its own."""
    own = torch.autograd.grad(
        [row[i] for row in rows], list(named.values()), [w[i] for w in weights], retain_graph=True, allow_unused=True
    )
    pairs = zip(own, direction.values(), strict=True)
    dense = ((g.to_dense() if g.is_sparse else g, along) for g, along in pairs if g is not None)
    return float(sum((float((g.double() * along.double()).sum()) for g, along in dense), start=0.0))
