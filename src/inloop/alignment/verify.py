"""The guard that catches silent errors: for every parameter p, ``sum_i c_i(p.grad) = ‖p.grad‖²``.

It divides both sides by ‖p.grad‖, since squares of small gradients are too small for float32. If the equation holds,
every use of the parameter in the loss went through a recorded layer call, with the right formula. The guard does not
see *which* example a row belongs to, nor whether the loss was a mean or a sum.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from inloop.alignment.direction import in_parts
from inloop.alignment.kept import Kept
from inloop.alignment.plan import Plan
from inloop.distributed import gather_numbers, is_sharded, sum_over_processes, whole, world_size
from inloop.errors import VerificationError

# Relative to the sum of |c_i|, by the coarsest precision: far above rounding, far below any real omission.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_TF32 = 1e-2  # as for float16: a GPU may round the factors of float32 products to ten bits
_ROUNDING = 1e-2  # times the tolerance: rounding of a gradient, as a share of the largest in the same module
_TINY = 1e-6  # as a share of the largest gradient
_NOTHING = 1e-12  # as a share of the largest gradient: whatever is missing there has no effect
_LARGE = 1e-3  # the same
_CERTAIN = 1e-3  # the share of a parameter's gradient that may be missing if all are looked at together


def verify_calls(
    calls: Sequence[Kept],
    gradients: Mapping[str, Tensor | None],
    names: Collection[str],
    plan: Plan,
    only_large: bool = False,
) -> None:
    """Check the equation for the parameters ``names``.

    Args:
        only_large: Leave out small gradients, which may have cancelled within each example: the calls have no magnitudes.
        plan: Groups the parameters by layer, to gather sharded gradients layer by layer.

    Raises:
        VerificationError: If a parameter does not add up; it names the first.
    """
    given = {name: g for name in names if (g := gradients[name]) is not None}
    norms = dict.fromkeys(names, 0.0)
    left = set(names)
    if world_size() == 1 and not any(is_sharded(g) for g in given.values()):
        norms.update({name: float(g.abs().double().norm()) for name, g in given.items()})
        left -= _that_add_up_together(calls, given, norms)
    if not left:
        return
    sums = dict.fromkeys(left, (0.0, 0.0))
    for part in in_parts(gradients, plan):
        units = _units(part, left)
        norms.update({name: norm for name, (norm, _) in units.items()})

        def add(call: Kept, units: dict[str, tuple[float, Tensor]] = units) -> None:
            for local, name in call.parameter_names.items():
                if name in units:
                    aligned = call.align({local: units[name][1]}).double()
                    total, magnitude = sums[name]
                    sums[name] = total + float(aligned.sum()), magnitude + float(aligned.abs().sum())

        for call in calls:
            call.visit_layers(add)
    least = (_LARGE if only_large else _NOTHING) * max(norms.values(), default=0.0)
    sums = _mean_over_processes(sums)
    coarsest = float(gather_numbers(max((_tolerance(call) for call in calls), default=0.0)).max())
    for name, (total, magnitude) in sorted(sums.items()):
        gradient = gradients[name]
        if norms[name] < least:
            continue
        norm, tolerance = norms[name], max(coarsest, 0.0 if gradient is None else _TOLERANCE[gradient.dtype.to_real()])
        if not abs(total - norm) <= tolerance * max(magnitude, norm):
            # A gradient that cancels within each example (a key's bias in attention) is only rounding error.
            if norm > 0 and abs(total - norm) <= tolerance * _magnitude(calls, name, gradients[name], norm):
                continue
            if abs(total - norm) <= _ROUNDING * tolerance * _largest_beside(calls, name, norms):
                continue
            raise VerificationError(_what_is_wrong(name, total, norm, _is_added_in_bfloat16(calls, name)))


def _tolerance(call: Kept) -> float:
    """The tolerance for a call, by the precision that its device computes in."""
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    rounds = call.device.type == "cuda" and call.coarsest is torch.float32 and tf32
    return _TF32 if rounds else _TOLERANCE[call.coarsest]


def _that_add_up_together(
    calls: Sequence[Kept], gradients: Mapping[str, Tensor], norms: Mapping[str, float]
) -> set[str]:
    """Return parameters for which one alignment shows that the equation holds: all that are not tiny, or none.

    Along ``sum_p s_p p.grad / ‖p.grad‖²``, with random s_p between 1 and 2, the contributions add up to the sum of the s_p. A
    parameter that does not add up changes that by about its error. Tiny gradients may be mere rounding, and would drown it.
    """
    least = _TINY * max(norms.values(), default=0.0)
    chosen = sorted(name for name in gradients if norms[name] > least)
    generator = torch.Generator().manual_seed(0)
    factors = dict(zip(chosen, (1 + torch.rand(len(chosen), generator=generator, device="cpu")).tolist(), strict=True))
    direction = {name: gradients[name] * (factors[name] / norms[name] ** 2) for name in chosen}
    total = magnitude = 0.0
    for call in calls:
        along = {local: direction[name] for local, name in call.parameter_names.items() if name in direction}
        if along:
            aligned = call.align(along).double()
            total, magnitude = total + float(aligned.sum()), magnitude + float(aligned.abs().sum())
    tolerance = max([_tolerance(call) for call in calls], default=0.0)
    error = abs(total - sum(factors.values()))
    return set(chosen) if error <= min(tolerance * magnitude, _CERTAIN) else set()


def _units(gradients: Mapping[str, Tensor | None], names: Collection[str]) -> dict[str, tuple[float, Tensor]]:
    """Return ‖g‖ and g / ‖g‖ for every gradient that is not zero."""
    norms = {name: float(g.abs().double().norm()) for name, g in gradients.items() if g is not None and name in names}
    return {name: (norm, g / norm) for name, norm in norms.items() if norm > 0 and (g := gradients[name]) is not None}


def _mean_over_processes(sums: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Average over processes: each accounts for its own examples, and gradients are means over processes."""
    names = sorted(sums)
    means = (
        sum_over_processes(torch.tensor([sums[name] for name in names], dtype=torch.float64, device="cpu"))
        / world_size()
    )
    return {name: (total, magnitude) for name, (total, magnitude) in zip(names, means.tolist(), strict=True)}


def refuse_unseen_uses(unseen: Collection[str]) -> None:
    """Raise VerificationError if a backward pass reached parameters that no recorded call used; name the first."""
    if unseen:
        raise VerificationError(
            f"Parameter '{min(unseen)}' has a gradient, but no recorded call or operation used it. What usually is the reason: it is used "
            "outside of the model's forward (in the loss, or in a method other than forward), in a custom autograd function, in "
            "torch.vmap, in a reentrant checkpoint, or through a view. Fix: use it in the model's forward by plain torch functions, "
            "put it into a small module of its own, or leave it out with layers=."
        )


def _magnitude(calls: Sequence[Kept], name: str, gradient: Tensor | None, norm: float) -> float:
    """Return ``sum |dout| |f(x; g)|``, element by element, for the unit g along the gradient."""
    assert gradient is not None
    unit, magnitude = whole(gradient) / norm, 0.0

    def add(call: Kept) -> None:
        nonlocal magnitude
        for local, canonical in call.parameter_names.items():
            if canonical == name:
                magnitude += float(call.align({local: unit}, magnitudes=True).abs().sum())

    for call in calls:
        call.visit_layers(add)
    return _mean_over_processes({name: (0.0, magnitude)})[name][1]


def _largest_beside(calls: Sequence[Kept], name: str, norms: Mapping[str, float]) -> float:
    """Return the largest norm of the gradients in the modules to run again that have this parameter; 0 if there is none.

    What cancels inside of such a module cannot be seen, but its rounding is that of the module's other gradients. All of
    them are right or wrong together, so this hides no omission.
    """
    boxes = [call for call in calls if call.needs_backward and name in call.parameter_names.values()]
    return max((norms.get(other, 0.0) for call in boxes for other in call.parameter_names.values()), default=0.0)


_CAUSES = """Fix: see which of the usual reasons it is.
  - gradients of the step before were not cleared: optimizer.zero_grad() after optimizer.step()
  - they were clipped or scaled before they were looked at: call learner.step(loss) right after loss.backward()
  - learner.step was called for a micro-batch: once for each optimizer step, after the last of its backward passes
  - the loss has a penalty on the weights, which belongs to no example: loss.backward(); learner.step(loss); penalty.backward(); optimizer.step()
  - a hook on a tensor or a parameter scales the gradient: scale the loss, or the learning rate
  - a backward pass that is not part of the step (SAM's first, all but the last of LBFGS's closure, a probe): put it into `with learner.paused():`
If none of them is it, inloop.check(model, batch, losses) compares every parameter with brute force."""
_UNUSED = """No recorded layer used it. Fix: see which of the usual reasons it is.
  - it is used outside of the model's forward pass, in a method or in the loss: use it in forward, and call the model itself
  - it is used in a custom autograd function, or in torch.func: use it by plain torch functions
  - its module is not called, only its weight is used: call the module
  - it is used within a reentrant checkpoint: torch.utils.checkpoint.checkpoint(..., use_reentrant=False)
  - a layer was exchanged after recording began: make the learner, or the recording, for the model as it is now
Or leave it out with layers=."""
_ADDED_IN_BFLOAT16 = (
    "On a CPU, torch adds up the gradients of norms over examples and positions in bfloat16, so they are far too small with a few thousand rows. "
    "Fix: keep the norm in float32 (torch.autocast(..., enabled=False) around it), or if you accept these gradients, Recording(verify=False)."
)


def _is_added_in_bfloat16(calls: Sequence[Kept], name: str) -> bool:
    """Whether the parameter is that of a norm whose output is in bfloat16 on a CPU."""
    return any(
        name in call.parameter_names.values()
        and "Norm" in call.kind
        and call.coarsest is torch.bfloat16
        and call.device.type == "cpu"
        for call in calls
    )


def _what_is_wrong(name: str, total: float, norm: float, added_in_bfloat16: bool) -> str:
    if not math.isfinite(norm):
        cause = "Fix: see whether the data, the loss or the parameters hold nan or infinite numbers."
    elif added_in_bfloat16 and abs(total) > norm:
        cause = _ADDED_IN_BFLOAT16
    elif total == 0.0:
        cause = _UNUSED
    else:
        cause = _CAUSES
        if world_size() > 1:
            cause = f"The gradient must be the mean over the {world_size()} processes (DistributedDataParallel, fully_shard). {cause}"
    return (
        f"Parameter '{name}': its gradient has the norm {norm:.6g}, of which the recorded examples account for {total:.6g}; the "
        f"two must be equal. {cause}"
    )
