"""A hook on the gradient of a layer's output that in-place operations cannot shake off.

A tensor's hook sees the gradient of the value that it had when the hook was set, also if the tensor is changed in place
afterwards. That fails for a view: changing it in place gives it a new history, without the hook. (Linear with a bias returns
a view for inputs with more than two axes.) So a view's hook is set on its base, and reads the view's part of the gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def hook_gradient(output: Tensor, write: Callable[[Tensor], object]) -> None:
    """Call ``write`` with the gradient of ``output`` as it is now. A view must be the only one of its base that is used."""
    base = output._base
    if base is None:

        def write_all(dout: Tensor) -> None:
            write(dout)

        output.register_hook(write_all)
        return
    size, stride, offset = output.size(), output.stride(), output.storage_offset()
    base_size, base_stride, base_offset = base.size(), base.stride(), base.storage_offset()

    def write_part(dbase: Tensor) -> None:
        dbase = dbase.detach()
        if dbase.stride() != base_stride:  # a gradient may be laid out in another way, or expanded
            dbase = torch.empty_strided(base_size, base_stride, dtype=dbase.dtype, device=dbase.device).copy_(dbase)
        write(dbase.as_strided(size, stride, dbase.storage_offset() + offset - base_offset))

    base.register_hook(write_part)
