"""A module is run again by other kernels than in the step: fused attention and cuDNN's LSTM have no second derivative.

Other kernels draw dropout in another order, or from numbers of their own. Then rewards must still be those of the step's own masks; a refusal
is right only if it says that this is the reason.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from inloop import capture
from inloop.alignment.oracles import align_by_loss
from inloop.errors import UnsupportedLayerError
from tests.device.problems import PROBLEMS, LastState


def error_of_rewards(model, dtype=torch.float64):
    """The largest error of the rewards of a captured step, relative to the largest reward by brute force."""
    problem = PROBLEMS["lstm"]
    model.to("cuda", dtype)
    x, y = (column[:8].cuda() for column in problem.sources(dtype=dtype)[1])
    torch.manual_seed(0)
    with capture(model, verify=False) as tape:
        losses_N = problem.losses(model(x), y)
        losses_N.mean().backward(retain_graph=True)
    direction = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    oracle_N = align_by_loss(model, losses_N, direction)
    return float((tape.align(direction) - oracle_N).abs().max() / oracle_N.abs().max())


# ------------------------------------------------------------------ attention


def weighted_values(q, k, v, kept):
    return ((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1) * kept) @ v


class FusedAttention(torch.autograd.Function):
    """Attention with a backward pass that cannot be differentiated."""

    @staticmethod
    def forward(ctx, q, k, v, kept):
        ctx.save_for_backward(q, k, v, kept)
        return weighted_values(q, k, v, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *inputs, kept = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            gradients = torch.autograd.grad(weighted_values(*inputs, kept), inputs, dout)
        return *gradients, None


def attention_with_two_kernels(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """The fused kernel draws its mask by columns, the kernel of plain operations by rows."""
    is_fused = torch.backends.cuda.mem_efficient_sdp_enabled()
    rows, columns = q.shape[-2], k.shape[-2]
    ones = q.new_ones(*q.shape[:-2], *((columns, rows) if is_fused else (rows, columns)))
    kept = F.dropout(ones, dropout_p)
    return FusedAttention.apply(q, k, v, kept.mT) if is_fused else weighted_values(q, k, v, kept)


def test_attention_has_the_rewards_of_the_fused_kernels_dropout(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_with_two_kernels)
    assert error_of_rewards(PROBLEMS["attention"].model()) < 1e-9


# ------------------------------------------------------------------ LSTM


class CuDnnLSTM(nn.LSTM):
    """Draws dropout between the layers as cuDNN does: from a state of its own, which moves with each call."""

    calls = itertools.count()

    def forward(self, x):
        if not torch.backends.cudnn.enabled:
            return super().forward(x)
        zeros = x.new_zeros(1, len(x), self.hidden_size)
        first, second = self._flat_weights[:4], self._flat_weights[4:]
        options = (True, 1, 0.0, self.training, False, True)
        out, *_ = torch._VF.lstm(x, (zeros, zeros), first, *options)
        state = torch.Generator("cuda").manual_seed(next(self.calls))
        kept = torch.rand(out.shape, generator=state, device="cuda") > self.dropout
        out, *_ = torch._VF.lstm(out * kept / (1 - self.dropout), (zeros, zeros), second, *options)
        return out, None


class RoundedLSTM(nn.LSTM):
    """Multiplies as cuDNN does by default: with TF32, which matrix products outside of cuDNN do not use."""

    def forward(self, x):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.enabled
        try:
            return super().forward(x)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False


def with_lstm(kind, dropout):
    model = LastState()
    model.lstm = kind(4, 5, num_layers=2, dropout=dropout, batch_first=True)
    return model


def test_an_lstm_with_cudnns_dropout_is_refused_for_it():
    with pytest.raises(UnsupportedLayerError, match="cuDNN draws"):
        error_of_rewards(with_lstm(CuDnnLSTM, 0.3))


def test_an_lstm_that_is_rounded_in_the_step_alone_is_not_refused():
    assert error_of_rewards(with_lstm(RoundedLSTM, 0.0), torch.float32) < 1e-2
