"""Recording the use of parameters outside of layers' calls: the operation where they meet the data, as a call of its own."""

from torch import Tensor

from inloop.alignment.black_box import BLACK_BOX, fingerprint
from inloop.alignment.call import Autocast, LayerCall, versions_of
from inloop.alignment.layout import Layout
from inloop.alignment.operation import Operation, local_names
from inloop.alignment.output_hook import hook_gradient
from inloop.alignment.tape import Tape
from inloop.alignment.trace import Use
from inloop.errors import UnsupportedLayerError


def record_use(tape: Tape, use: Use, parameters: dict[str, Tensor], layout: Layout, num_examples: int | None) -> None:
    """Write a call to the tape when the gradient of the operation's output arrives.

    Args:
        parameters: Those in the operation, by name.
        layout: Where the examples are in its output.
    """
    _refuse_shared(use, layout, num_examples)
    tape.note_first(parameters.values())
    out, args = use.out, tuple(tensor.detach() for tensor in use.data)
    call = LayerCall(
        name=f"{use.names[0]} {use.where}",
        layer=Operation(use.recipe, {name: value.detach().clone() for name, value in parameters.items()}),
        rule=BLACK_BOX,
        parameter_names=local_names(use.names),
        args=args,
        kwargs={},
        autocast=Autocast.current(out.device.type),
        batch=tape.batch,
        versions=versions_of(args),
        fingerprints=(fingerprint(out),),
        example_of_row=layout.example_of_row(layout.fold(out, num_examples), out),
    )
    hook_gradient(out, tape.wait_for_gradient(call, batch_axis=layout.axis))


def _refuse_shared(use: Use, layout: Layout, num_examples: int | None) -> None:
    shape = tuple(use.out.shape)
    if shape and (num_examples is None or shape[layout.axis] == layout.fold(use.out, num_examples) * num_examples):
        return
    raise UnsupportedLayerError(
        f"Parameter '{use.names[0]}' meets the data {use.where}, in a tensor of shape {shape}, in which the {num_examples} examples "
        "cannot be found on the first axis. Fix: give it a row for each example, as in queries.expand(N, -1, -1), put the "
        "operation into a small module of its own, or leave the parameter out with layers=."
    )
