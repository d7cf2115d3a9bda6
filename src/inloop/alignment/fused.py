"""A layer whose own backward pass forms the examples' gradients, and adds them up to the batch's.

Where the examples' gradients ``∂l_i/∂θ``, [N, *θ], are what is kept of a call (``reduced.py``), the gradient of the batch is their sum
and need not be computed a second time: they cost hardly more than what training does anyway. So the layer's output is given
another node in the graph, with the layer's own backward pass but for this. What the layer computed stays as it is; gradients
of the parameters are added up in another order, and differ from before by rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from inloop.alignment.call import LayerCall
from inloop.alignment.per_example import PerExample
from inloop.alignment.reduced import AnyCall, ReducedCall, is_worthwhile

Write = Callable[[Tensor], AnyCall | None]


def can_fuse(call: LayerCall, module: nn.Module, args: tuple[Any, ...], outputs: list[Tensor]) -> bool:
    """Whether the graph node of this call may be exchanged, and should be."""
    form = call.rule.per_example
    if form is None or form.backward is None or len(args) != 1 or len(outputs) != 1:
        return False
    (x,), (output,) = args, outputs
    if type(x) is not Tensor or type(output) is not Tensor:
        return False
    parameters = [value for value in module._parameters.values() if value is not None]
    return (
        all(type(value) is nn.Parameter for value in parameters)
        and all(value.dtype == output.dtype and value.device == output.device for value in (*parameters, x))
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and not _has_another_owner(output)
        and is_worthwhile(call.with_gradient(output.detach(), 0, 0), fused=True)
    )


def _has_another_owner(output: Tensor) -> bool:
    """Whether another learner, or a user, waits for the gradient of this output, or has exchanged its node already."""
    seen = [output] if output._base is None else [output, output._base]
    return any(tensor._backward_hooks for tensor in seen) or isinstance(output.grad_fn, _Fused._backward_cls)


def fuse(call: LayerCall, module: nn.Module, x: Tensor, output: Tensor, write: Write) -> Tensor:
    """The same output, which calls ``write`` with its gradient and takes from the call that was written what it has formed."""
    form = call.rule.per_example
    assert form is not None
    node = _Node(form, call.layer, write, output.detach())
    fused: Tensor = _Fused.apply(node, x, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return fused


class _Node:
    """What the backward pass needs besides tensors."""

    def __init__(self, form: PerExample, layer: nn.Module, write: Write, output: Tensor) -> None:
        self.form, self.layer, self.write = form, layer, write
        self.output: Tensor | None = output

    def take_output(self) -> Tensor:
        """It has one owner: the graph must not hold it."""
        output, self.output = self.output, None
        assert output is not None
        return output


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.node = node
        ctx.save_for_backward(x, weight)
        return node.take_output()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = dict(zip(("x", "weight", "bias"), ctx.needs_input_grad[1:], strict=True))
        written = ctx.node.write(dout)
        formed: dict[str, Tensor] = {}
        if isinstance(written, ReducedCall) and not torch.is_grad_enabled():  # else a graph of this pass is wanted
            formed = {name: gradient.sum(dim=0) for name, gradient in written.gradients.items()}
        missing = tuple(wanted[name] and name not in formed for name in wanted)
        dx, dweight, dbias = ctx.node.form.backward(ctx.node.layer, x, weight, dout, missing)
        return None, dx, formed.get("weight", dweight), formed.get("bias", dbias)
