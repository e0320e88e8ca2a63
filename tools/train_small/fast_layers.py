"""Triton kernels for the AudioVAE's training on a GPU: snake and the depthwise causal convolution, with gradients.

They give what the official layers give; PyTorch's own depthwise convolutions take most of a training step otherwise.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import nn

from train_small.official import CausalConv1d, Snake1d

_TAPS = 7


@triton.jit
def _depthwise(
    x, w, bias, y, channels, length,
    DILATION: tl.constexpr, TAPS: tl.constexpr, REVERSED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = row % channels
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        shift = (TAPS - 1 - tap) * DILATION
        if REVERSED:  # noqa: SIM108  a branch of the compiler's
            source = t + shift
        else:
            source = t - shift
        inside = (source >= 0) & (source < length)
        total += tl.load(w + channel * TAPS + tap) * tl.load(x + row * length + source, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + channel)
    tl.store(y + row * length + t, total, mask=t < length)


@triton.jit
def _depthwise_weights(
    x, grad, dw, db, batch, channels, length, split, DILATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    channel = tl.program_id(0)
    first = tl.program_id(1)
    blocks = tl.cdiv(length, BLOCK)
    a0 = tl.zeros((BLOCK,), tl.float32)
    a1 = tl.zeros((BLOCK,), tl.float32)
    a2 = tl.zeros((BLOCK,), tl.float32)
    a3 = tl.zeros((BLOCK,), tl.float32)
    a4 = tl.zeros((BLOCK,), tl.float32)
    a5 = tl.zeros((BLOCK,), tl.float32)
    a6 = tl.zeros((BLOCK,), tl.float32)
    ab = tl.zeros((BLOCK,), tl.float32)
    for i in range(first, batch * blocks, split):
        base = ((i // blocks) * channels + channel) * length
        t = (i % blocks) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(grad + base + t, mask=t < length, other=0.0)
        p = x + base + t
        ab += g
        a0 += g * tl.load(p - 6 * DILATION, mask=(t >= 6 * DILATION) & (t < length), other=0.0)
        a1 += g * tl.load(p - 5 * DILATION, mask=(t >= 5 * DILATION) & (t < length), other=0.0)
        a2 += g * tl.load(p - 4 * DILATION, mask=(t >= 4 * DILATION) & (t < length), other=0.0)
        a3 += g * tl.load(p - 3 * DILATION, mask=(t >= 3 * DILATION) & (t < length), other=0.0)
        a4 += g * tl.load(p - 2 * DILATION, mask=(t >= 2 * DILATION) & (t < length), other=0.0)
        a5 += g * tl.load(p - DILATION, mask=(t >= DILATION) & (t < length), other=0.0)
        a6 += g * tl.load(p, mask=t < length, other=0.0)
    q = dw + channel * 7
    tl.atomic_add(q, tl.sum(a0))
    tl.atomic_add(q + 1, tl.sum(a1))
    tl.atomic_add(q + 2, tl.sum(a2))
    tl.atomic_add(q + 3, tl.sum(a3))
    tl.atomic_add(q + 4, tl.sum(a4))
    tl.atomic_add(q + 5, tl.sum(a5))
    tl.atomic_add(q + 6, tl.sum(a6))
    tl.atomic_add(db + channel, tl.sum(ab))


@triton.jit
def _snake(x, alpha, y, channels, length, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(alpha + row % channels)
    value = tl.load(x + row * length + t, mask=t < length, other=0.0)
    sine = tl.sin(a * value)
    tl.store(y + row * length + t, value + sine * sine / (a + 1e-9), mask=t < length)


@triton.jit
def _snake_backward(x, alpha, grad, dx, dalpha, channels, length, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(alpha + row % channels)
    value = tl.load(x + row * length + t, mask=t < length, other=0.0)
    g = tl.load(grad + row * length + t, mask=t < length, other=0.0)
    sine = tl.sin(a * value)
    double = 2.0 * sine * tl.cos(a * value)
    inverse = 1.0 / (a + 1e-9)
    tl.store(dx + row * length + t, g * (1.0 + a * inverse * double), mask=t < length)
    tl.atomic_add(dalpha + row % channels, tl.sum(g * (value * inverse * double - sine * sine * inverse * inverse)))


def _block(length: int) -> int:
    return min(1024, max(64, triton.next_power_of_2(length)))


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dilation):
        x, weight = x.contiguous(), weight.contiguous()
        batch, channels, length = x.shape
        y, block = torch.empty_like(x), _block(length)
        grid = (batch * channels, triton.cdiv(length, block))
        _depthwise[grid](x, weight, bias, y, channels, length, dilation, _TAPS, False, True, block)
        ctx.save_for_backward(x, weight)
        ctx.dilation = dilation
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        batch, channels, length = x.shape
        dx, block = torch.empty_like(x), _block(length)
        blocks = triton.cdiv(length, block)
        grid = (batch * channels, blocks)
        _depthwise[grid](grad, weight, weight, dx, channels, length, ctx.dilation, _TAPS, True, False, block)
        dw, db = torch.zeros_like(weight), torch.zeros(channels, device=x.device)
        split = max(1, min(batch * blocks, 1024 // channels + 1))
        _depthwise_weights[(channels, split)](x, grad, dw, db, batch, channels, length, split, ctx.dilation, block)
        return dx, dw, db, None


class _Snake(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        x = x.contiguous()
        batch, channels, length = x.shape
        y, block = torch.empty_like(x), _block(length)
        _snake[(batch * channels, triton.cdiv(length, block))](x, alpha, y, channels, length, block)
        ctx.save_for_backward(x, alpha)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, alpha = ctx.saved_tensors
        grad = grad.contiguous()
        batch, channels, length = x.shape
        dx, dalpha, block = torch.empty_like(x), torch.zeros_like(alpha), _block(length)
        grid = (batch * channels, triton.cdiv(length, block))
        _snake_backward[grid](x, alpha, grad, dx, dalpha, channels, length, block)
        return dx, dalpha


@contextlib.contextmanager
def fast_layers(module: nn.Module):
    """Within this context the official layers inside `module`, which is on a GPU, run through the kernels above."""
    replaced = []
    for layer in module.modules():
        if isinstance(layer, Snake1d):
            forward = lambda x, m=layer: _Snake.apply(x, m.alpha)  # noqa: E731
        elif not isinstance(layer, CausalConv1d):
            continue
        elif layer.groups == layer.in_channels > 1 and layer.kernel_size == (_TAPS,):
            forward = lambda x, m=layer: _DepthwiseConv.apply(x, m.weight, m.bias, m.dilation[0])  # noqa: E731
        elif layer.groups == 1 and layer.kernel_size == (1,):
            forward = lambda x, m=layer: torch.baddbmm(  # noqa: E731
                m.bias[None, :, None], m.weight[:, :, 0].expand(x.shape[0], -1, -1), x
            )
        else:
            continue
        layer.forward = forward
        replaced.append(layer)
    try:
        yield
    finally:
        for layer in replaced:
            del layer.forward
