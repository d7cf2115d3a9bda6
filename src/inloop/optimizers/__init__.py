"""How an optimizer's step depends on the gradient: the derivative of the update, by optimizer.

More weight on an example changes g_t. This changes the update, which changes the reference loss:

    r_i = <∇l_i(θ_t), Pᵀ g_ref>          P = -∂(θ_{t+1} - θ_t) / ∂g_t

For SGD, P is the learning rate times the momentum's factor. For optimizers with a second moment v it is diagonal,

    u = N / D,      P = lr (N' / D - N D' / D²)          N: numerator, D = √v̂ + ε, both functions of g_t

The second term is the second moment's own dependence on g_t, small after some steps (v̂ averages over 1 / (1 - β2)).
"fixed", the default, leaves it out and needs no memory; "moving" includes it and keeps a copy of the step's gradients.
Weight decay does not depend on g_t. Clipping by a global norm is a factor that all examples share, if held fixed.
"""

from inloop.optimizers import torch_optimizers as _torch_optimizers  # noqa: F401  registers torch's optimizers
from inloop.optimizers.derivative import StepDerivative as StepDerivative
from inloop.optimizers.derivative import as_derivative as as_derivative
from inloop.optimizers.registry import register_derivative as register_derivative
