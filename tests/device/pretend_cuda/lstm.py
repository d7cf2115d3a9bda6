"""The kernels of an LSTM's cell: torch has them for CUDA alone."""

import torch
from torch import Tensor

_kept = []


def register() -> None:
    """Let LSTMs run on the device."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_lstm_cell", _cell, "CUDA")
    library.impl("_thnn_fused_lstm_cell_backward_impl", _cell_backward, "CUDA")
    _kept.append(library)  # a library that nobody refers to takes its kernels along


def _cell(
    of_input: Tensor, of_hidden: Tensor, c: Tensor, bias_i: Tensor | None = None, bias_h: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden state, the cell's state, and what the backward pass needs."""
    gates = of_input + of_hidden
    if bias_i is not None and bias_h is not None:
        gates = gates + bias_i + bias_h
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_c = f * c + i * g
    return o * new_c.tanh(), new_c, torch.cat([i, f, g, o], 1)


def _cell_backward(
    dh: Tensor | None, dc: Tensor | None, c: Tensor, new_c: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the gates, of the cell's state, and of the bias."""
    i, f, g, o = workspace.chunk(4, 1)
    tanh = new_c.tanh()
    dh = torch.zeros_like(new_c) if dh is None else dh
    d = dh * o * (1 - tanh * tanh) + (0 if dc is None else dc)
    of_gates = [d * g * i * (1 - i), d * c * f * (1 - f), d * i * (1 - g * g), dh * tanh * o * (1 - o)]
    gates = torch.cat(of_gates, 1)
    return gates, d * f, gates.sum(0) if has_bias else gates.new_empty(0)
