"""The AudioVAE's Triton kernels give what the lines of torch beside them give, in float32."""

import pytest
import torch

from dq_engine.kernels.causal_depthwise import causal_depthwise, causal_depthwise_torch
from dq_engine.kernels.causal_gemm import causal_gemm, causal_gemm_torch
from dq_engine.kernels.causal_output import causal_output, causal_output_torch
from dq_engine.kernels.snake import Activation
from dq_engine.kernels.stream_state import shift_in, shift_in_torch

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
# Of a value of about 1.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SLOTS = [7, 2, 5]


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def make_state(past: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """As in the decoder: a part of every slot's row."""
    return randn(9, past * channels + 100, dtype=dtype)[:, 64 : 64 + past * channels].view(9, past, channels)


def make_activation(channels: int, affine: bool) -> Activation:
    alpha = torch.rand(channels, device="cuda") + 0.5
    scale = torch.rand(channels, device="cuda") + 0.5 if affine else None
    return Activation(scale, randn(channels, dtype=torch.float32) if affine else None, alpha, alpha.reciprocal())


def assert_close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape
    scale = exact.float().abs().clamp(min=1.0)
    assert ((ours.float() - exact.float()).abs() / scale).max() < TOLERANCE[dtype]


def exactly(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [t if t is None or t.dtype == torch.int64 else t.float() for t in tensors]


@DTYPES
@pytest.mark.parametrize("past", [1, 6, 54])
@pytest.mark.parametrize("frames", [4, 32, 1000])
def test_shift_in(frames, past, dtype):
    state, slots = make_state(past, 40, dtype), torch.tensor(SLOTS, device="cuda")
    exact = state.clone()
    for _ in range(2):
        x = randn(3, frames, 40, dtype=dtype)
        shift_in(x, slots, state)
        shift_in_torch(x, slots, exact)
        assert torch.equal(state, exact), "and the other slots keep theirs"


@DTYPES
@pytest.mark.parametrize("snake", [True, False])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("frames", "channels"), [(4, 64), (32, 1024), (54, 24), (7680, 32)])
def test_causal_depthwise(frames, channels, dilation, snake, dtype):
    x, state, slots = (
        randn(3, frames, channels, dtype=dtype),
        make_state(6 * dilation, channels, dtype),
        torch.tensor(SLOTS, device="cuda"),
    )
    weight, bias = randn(7, channels, dtype=dtype) / 3, randn(channels, dtype=dtype)
    activation = make_activation(channels, False) if snake else None
    ours = causal_depthwise(x, slots, state, weight, bias, dilation, activation)
    exact = causal_depthwise_torch(*exactly(x, slots, state, weight, bias), dilation, activation)
    assert_close(ours, exact, dtype)


@DTYPES
@pytest.mark.parametrize(
    ("frames", "inner", "outer", "stride", "taps", "dilation", "residual", "affine", "keep_raw"),
    [
        (4, 64, 2048, 1, 1, 1, False, True, False),
        (4, 512, 256, 8, 2, 1, False, False, True),
        (7680, 32, 32, 1, 1, 1, True, False, True),
        (192, 512, 512, 1, 1, 1, True, True, False),
        (33, 40, 70, 1, 7, 3, False, False, True),
    ],
)
def test_causal_gemm(frames, inner, outer, stride, taps, dilation, residual, affine, keep_raw, dtype):
    slots = torch.tensor(SLOTS, device="cuda")
    x, state = randn(3, frames, inner, dtype=dtype), make_state((taps - 1) * dilation, inner, dtype)
    weight = randn(taps, inner, stride * outer, dtype=dtype) / (taps * inner) ** 0.5
    bias = randn(outer, dtype=dtype)
    added = randn(3, frames * stride, outer, dtype=dtype) if residual else None
    activation = make_activation(outer, affine)
    ours = causal_gemm(x, slots, state, weight, bias, dilation, added, activation, keep_raw)
    exact = causal_gemm_torch(*exactly(x, slots, state, weight, bias), dilation, *exactly(added), activation, keep_raw)
    assert_close(ours[1], exact[1], dtype)
    assert (ours[0] is None) == (exact[0] is None) == (not keep_raw)
    if keep_raw:
        assert_close(ours[0], exact[0], dtype)


@DTYPES
@pytest.mark.parametrize(("frames", "channels"), [(7680, 32), (130, 4)])
def test_causal_output(frames, channels, dtype):
    slots = torch.tensor(SLOTS, device="cuda")
    x, state = randn(3, frames, channels, dtype=dtype), make_state(6, channels, dtype)
    weight, bias = randn(7, channels, dtype=dtype) / (7 * channels) ** 0.5, randn(1, dtype=dtype)
    ours = causal_output(x, slots, state, weight, bias)
    assert ours.dtype == torch.float32
    assert_close(ours, causal_output_torch(*exactly(x, slots, state, weight, bias)), torch.float32)
