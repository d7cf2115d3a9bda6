"""Two slow, obvious computations of the same rewards, to check the engine or your own model against.

If examples do not interact, both are equal. BatchNorm in training mode couples the examples of a batch. Then the batch
gradient has two decompositions, and both add up to it: by *loss*, the gradient of example i's loss through the whole
batch; and by *path*, the gradient that flows through example i's own activations. The paper and the engine reward by
path. Neither oracle shares code with the engine's rules.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from inloop.alignment.direction import Direction, resolve_direction
from inloop.alignment.plan import canonical_names
from inloop.errors import UsageError


def align_by_loss(model: nn.Module, losses_N: Tensor, direction: Direction) -> Tensor:
    """Return ``<∇l_i, direction>``, by one backward pass for each example.

    Args:
        losses_N: The loss of each example, with its graph, as from ``F.cross_entropy(model(x), y, reduction="none")``.
        direction: A tensor or None (zero) for every parameter that counts, by name; without an entry it does not count.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> losses = model(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).squeeze(1)
        >>> align_by_loss(model, losses, {"weight": torch.tensor([[1.0, 10.0]])})
        tensor([ 1., 20.])
    """
    if losses_N.dim() != 1:
        raise UsageError(
            f"losses_N has shape {tuple(losses_N.shape)}; one loss for each example is needed: reduction='none'."
        )
    counted = _resolved(model, direction)
    named = dict(model.named_parameters())
    parameters, directions = [named[name] for name in counted], list(counted.values())
    rewards = []
    for loss in losses_N:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        rewards.append(
            sum(
                ((g.to_dense() if g.is_sparse else g) * d).sum()
                for g, d in zip(gradients, directions, strict=True)
                if g is not None
            )
        )
    return torch.stack([torch.as_tensor(r, dtype=losses_N.dtype) for r in rewards]) if rewards else losses_N.detach()


def align_by_path(
    model: nn.Module, batch_loss: Callable[[nn.Module], Tensor], direction: Direction, reduction: str = "mean"
) -> Tensor:
    """Give each example its own copy of the weights, differentiate the batch loss by the copies, and dot them.

    This works with BatchNorm in training mode. It calls every other layer that owns parameters once per example, on
    that example's rows, and takes N times the memory of the model: use it on small models. Layers that own parameters
    must keep examples on the first axis of inputs and output. It does not replay dropout inside them.

    Args:
        batch_loss: Computes the batch loss with the given model, e.g. ``lambda model: F.cross_entropy(model(x), y)``.
        direction: As in :func:`align_by_loss`.
        reduction: How ``batch_loss`` reduces, "mean" or "sum".
    """
    replica = copy.deepcopy(model)
    names = canonical_names(replica)
    parameters = dict(replica.named_parameters())
    copies: dict[str, Tensor] = {}

    def own_copy(name: str, num_examples: int) -> Tensor:
        """Return a copy for each example, [N, ...]. A tied parameter has one such tensor under all its names."""
        if name not in copies:
            value = parameters[name].detach()
            copies[name] = value.expand(num_examples, *value.shape).clone().requires_grad_()
        return copies[name]

    for path, module in list(replica.named_modules()):
        own = {
            local: names[f"{path}.{local}" if path else local]
            for local, p in module._parameters.items()
            if p is not None
        }
        if own and any(next(child.parameters(), None) is not None for child in module.children()):
            raise UsageError(
                f"align_by_path cannot take '{path}' ({type(module).__name__}) apart: it owns parameters and so do modules below it. "
                "Fix: use align_by_loss, which is the same where examples do not interact."
            )
        if own:
            # This changes the replica, never the user's model.
            module.forward = _forward_per_example(copy.deepcopy(module), own, own_copy)
    loss = batch_loss(replica)
    resolved = _resolved(model, direction)
    counted = [name for name in copies if name in resolved]
    gradients = torch.autograd.grad(loss, [copies[name] for name in counted], allow_unused=True)
    num_examples = len(next(iter(copies.values())))
    total = torch.zeros(num_examples, dtype=loss.dtype, device=loss.device)
    for name, gradient in zip(counted, gradients, strict=True):
        if gradient is not None:
            total = total + (gradient * resolved[name]).flatten(start_dim=1).sum(dim=1)
    return total * num_examples if reduction == "mean" else total


def _forward_per_example(
    layer: nn.Module, own: Mapping[str, str], own_copy: Callable[[str, int], Tensor]
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        num_examples = len(args[0])
        copies = {local: own_copy(name, num_examples) for local, name in own.items()}
        if isinstance(layer, _BatchNorm):  # normalise together, scale and shift each example by its own
            plain = functional_call(
                layer, {"weight": torch.ones_like(layer.weight), "bias": torch.zeros_like(layer.bias)}, args
            )
            shape = (num_examples, -1, *[1] * (plain.dim() - 2))
            return plain * copies["weight"].reshape(shape) + copies["bias"].reshape(shape)
        outputs = []
        for i in range(num_examples):
            rows = [a[i : i + 1] if isinstance(a, Tensor) and len(a) == num_examples else a for a in args]
            outputs.append(
                functional_call(layer, {local: values[i] for local, values in copies.items()}, tuple(rows), kwargs)
            )
        return torch.cat(outputs)

    return forward


def _resolved(model: nn.Module, direction: Direction) -> dict[str, Tensor]:
    """Return the entries of trainable parameters that are not None, dense, by canonical name."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    resolved = resolve_direction(direction, canonical_names(model), shapes, needed=set())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in resolved.items() if value is not None and name in trainable}
