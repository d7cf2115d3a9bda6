"""Keeping less of a module without a rule: its examples' gradients at once, where they are smaller than what a replay needs.

A replay needs the module's input, the gradient of its output and a copy of its parameters. For a scale or a token on long sequences the
gradients of the examples, [N, *θ], are smaller. They are formed when the backward pass is over, by one more forward and backward pass in which
every example has parameters of its own (``vmap``); a replay costs one forward and two backward passes. Where the module cannot be run so, or
then has another output, it stays to be replayed.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from inloop.alignment.black_box import BLACK_BOX, fingerprint, is_same_output
from inloop.alignment.call import LayerCall, tensors_in
from inloop.alignment.reduced import MOST, PRECISE, ReducedCall


def reduced_box(call: LayerCall) -> LayerCall | ReducedCall:
    """The call or, if that takes less memory and is possible, its examples' gradients."""
    if not _is_worthwhile(call):
        return call
    try:
        gradients = _gradients(call)
    except Exception:  # whatever a module may do that cannot be done for each example by itself: it is replayed then
        return call
    if gradients is None:
        return call
    bare = replace(call, args=(), kwargs={}, dout=call.dout.new_empty(0), versions=(), fingerprints=())
    return ReducedCall(bare, gradients, num_positions=call.num_positions)


def _is_worthwhile(call: LayerCall) -> bool:
    if (
        call.rule is not BLACK_BOX
        or call.random_state
        or call.batch_axis != 0
        or call.example_of_row is not None
        or call.autocast.enabled
        or call.dout.dtype not in PRECISE
        or call.dout.dim() < 2
    ):
        return False
    parameters = dict(call.layer.named_parameters())
    size = sum(value.nbytes for name, value in parameters.items() if name in call.parameter_names)
    kept = sum(tensor.nbytes for tensor in tensors_in((call.args, call.kwargs, call.dout)))
    return call.num_examples * size <= MOST * (kept + sum(value.nbytes for value in parameters.values()))


def _gradients(call: LayerCall) -> dict[str, Tensor] | None:
    """Of every example, [N, *shape]; None if the output is another than in step t."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    places = [place for place, leaf in enumerate(leaves) if _has_examples(leaf, call.num_examples)]
    if len(places) > 1 and call.num_examples in leaves[places[0]].shape[1:]:
        return None  # positions may be as many: whose the rows of the others are cannot be told
    named = {name: value.detach() for name, value in call.layer.named_parameters(remove_duplicate=False)}
    fixed = {name: value for name, value in named.items() if name not in call.parameter_names}

    def product(trained: dict[str, Tensor], rows: list[Tensor], dout: Tensor) -> tuple[Tensor, Tensor]:
        own = list(leaves)
        for place, row in zip(places, rows, strict=True):
            own[place] = row.unsqueeze(0)
        args, kwargs = tree_unflatten(own, structure)
        alone = replace(call, args=args, kwargs=kwargs)
        output = tensors_in(alone.run(fixed | trained))[call.output_index]
        return (output * dout.unsqueeze(0)).sum(), output.squeeze(0)

    trained = {name: named[name] for name in call.parameter_names}
    rows = [leaves[place].detach() for place in places]
    with torch.enable_grad():
        gradients, outputs = vmap(grad(product, has_aux=True), in_dims=(None, 0, 0))(trained, rows, call.dout)
    if not is_same_output(fingerprint(outputs), call.fingerprints[call.output_index], outputs.dtype):
        return None
    return {name: gradient.detach() for name, gradient in gradients.items()}


def _has_examples(leaf: object, num_examples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == num_examples
