"""A tape as plain tensors, to be saved with a checkpoint and read back without executing code."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from inloop.alignment.black_box import BLACK_BOX, per_example_gradients
from inloop.alignment.call import Autocast, LayerCall, versions_of
from inloop.alignment.operation import Operation
from inloop.alignment.plan import Plan, Site
from inloop.alignment.reduced import AnyCall, ReducedCall
from inloop.alignment.tape import Tape
from inloop.alignment.twin import make_twin
from inloop.errors import UsageError


def tape_state(tape: Tape) -> dict[str, Any]:
    """What the tape holds. It is as large as the activations and output gradients of a step."""
    calls = [_any_call_state(call.full()) for call in tape.calls]
    return {
        "reduction": tape.reduction,
        "retain": tape.retain,
        "calls": calls,
        "part": dict(tape.part),
        "mean_over": tape.mean_over,
    }


def _any_call_state(call: AnyCall) -> dict[str, Any]:
    if isinstance(call, LayerCall) and not isinstance(call.layer, Operation):
        return _call_state(call)
    if isinstance(call, LayerCall):  # functions cannot be saved, but what they amount to
        bare = replace(call, layer=nn.Module(), args=(), kwargs={}, dout=call.dout.new_empty(0), fingerprints=())
        call = ReducedCall(bare, per_example_gradients(call))
    rest = {"gradients": dict(call.gradients), "magnitudes": dict(call.magnitudes), "num_positions": call.num_positions}
    operation = call.rule is BLACK_BOX
    bare = replace(call.call, layer=nn.Module()) if operation else call.call  # nothing of its module is needed any more
    return _call_state(bare) | {"reduced": rest, "operation": operation}


def restore_tape(plan: Plan, state: dict[str, Any]) -> Tape:
    """The tape of :func:`tape_state`, for a model with the same layers."""
    tape = Tape(plan, state["reduction"], state["retain"])
    tape.part, tape.mean_over = dict(state["part"]), state["mean_over"]
    sites = {site.name: site for site in plan.sites}
    for saved in state["calls"]:
        if saved.get("operation"):
            tape.calls.append(ReducedCall(_restore_call(_OPERATION, saved), **saved["reduced"]))
            continue
        if saved["name"] not in sites:
            raise UsageError(
                f"The saved tape has a call of layer '{saved['name']}', which is not recorded in this model. Fix: build the model "
                "and the learner as they were when the state was saved."
            )
        call = _restore_call(sites[saved["name"]], saved)
        tape.calls.append(ReducedCall(call, **saved["reduced"]) if "reduced" in saved else call)
    tape.close()
    return tape


def _call_state(call: LayerCall) -> dict[str, Any]:
    parameters = dict(call.layer.named_parameters(remove_duplicate=False)) if call.rule.keeps_parameters else {}
    return {
        "name": call.name,
        "taken_from": call.taken_from,
        "parameter_names": dict(call.parameter_names),
        "inputs": tree_map_only(Tensor, _compact, (call.args, call.kwargs)),
        "autocast": (call.autocast.device, call.autocast.enabled, call.autocast.dtype),
        "batch": call.batch,
        "random_state": dict(call.random_state),
        "output_index": call.output_index,
        "batch_axis": call.batch_axis,
        "example_of_row": call.example_of_row,
        "dout": _compact(call.dout),
        "fingerprints": call.fingerprints,
        "training": {name: module.training for name, module in call.layer.named_modules()},
        "buffers": dict(call.layer.named_buffers()),
        "parameters": parameters,
    }


def _compact(tensor: Tensor) -> Tensor:
    """A slice of a large tensor would be saved with all of it."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()


def _restore_call(site: Site, saved: dict[str, Any]) -> LayerCall:
    named = site.module.named_parameters(remove_duplicate=False)
    shapes = {name: torch.empty_like(parameter, device="meta") for name, parameter in named}
    layer = make_twin(site.module, shapes | saved["parameters"])
    for name, module in layer.named_modules():
        module.training = saved["training"][name]
    for name, buffer in saved["buffers"].items():
        owner, _, local = name.rpartition(".")
        _submodule(layer, owner)._buffers[local] = buffer
    args, kwargs = saved["inputs"]
    call = LayerCall(
        name=saved["name"],
        layer=layer,
        rule=site.rule,
        parameter_names=saved["parameter_names"],
        args=args,
        kwargs=kwargs,
        autocast=Autocast(*saved["autocast"]),
        batch=saved["batch"],
        random_state=saved["random_state"],
        versions=versions_of((args, kwargs)),
        fingerprints=saved["fingerprints"],
        example_of_row=saved["example_of_row"],
        taken_from=saved["taken_from"],
    )
    return call.with_gradient(saved["dout"], saved["output_index"], saved["batch_axis"])


_OPERATION = Site("", nn.Module(), BLACK_BOX, {})


def _submodule(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path) if path else module
