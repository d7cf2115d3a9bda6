"""The guard that catches silent errors: for every parameter p, ``sum_i c_i(p.grad) = ‖p.grad‖²``.

If it holds, every use of the parameter in the loss went through a recorded layer call, with the right formula. It does not
see *which* example a row belongs to, nor whether the loss was a mean or a sum.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from inloop.alignment.call import LayerCall
from inloop.errors import VerificationError

# Of the sum of |c_i|: far above rounding, far below any real omission.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def verify_calls(calls: Sequence[LayerCall], gradients: Mapping[str, Tensor | None], names: Collection[str]) -> None:
    """Check the equation for the parameters ``names``.

    Raises:
        VerificationError: Naming the first parameter that does not add up.
    """
    sums = dict.fromkeys(names, (0.0, 0.0))
    for call in calls:
        for local, name in call.parameter_names.items():
            gradient = gradients[name] if name in sums else None
            if gradient is not None:
                part = call.align({local: gradient}).double()
                total, magnitude = sums[name]
                sums[name] = total + float(part.sum()), magnitude + float(part.abs().sum())
    for name, (total, magnitude) in sorted(sums.items()):
        gradient = gradients[name]
        squared = 0.0 if gradient is None else float(gradient.double().square().sum())
        if not abs(total - squared) <= _tolerance(calls, gradient) * max(magnitude, squared):
            raise VerificationError(_what_is_wrong(name, total, squared))


def _tolerance(calls: Sequence[LayerCall], gradient: Tensor | None) -> float:
    """That of the coarsest precision that took part."""
    dtypes = {call.dout.dtype for call in calls} | ({gradient.dtype} if gradient is not None else set())
    return max((_TOLERANCE[dtype] for dtype in dtypes), default=0.0)


def _what_is_wrong(name: str, total: float, squared: float) -> str:
    if total == 0.0:
        cause = (
            "No recorded layer used it. Either it is used without calling its module (functional use of the weight), or the hooks "
            "were lost (a model compiled before recording began). Fix: call the module, or leave the parameter out with layers=."
        )
    else:
        cause = (
            "What usually is the reason: gradients were not cleared after the step before (optimizer.zero_grad()), or changed "
            "before they were looked at (clipping, scaling); a backward or autograd.grad call that is not part of the step (put "
            "it into learner.paused()); a loss that reaches the parameter past the examples (a penalty on weights belongs in the "
            "optimizer). If you mean it, pass verify=False."
        )
    return (
        f"Parameter '{name}': the recorded examples add up to {total:.6g}, its gradient's squared norm is {squared:.6g}; "
        f"the two must be equal. {cause}"
    )
