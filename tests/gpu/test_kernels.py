"""Each Triton kernel gives what the lines of torch beside it give."""

import pytest
import torch

from dq_engine.kernels.local_attention import local_attention, local_attention_torch
from dq_engine.kernels.rms_norm import add_rms_norm, add_rms_norm_torch
from dq_engine.kernels.silu_and_mul import silu_and_mul, silu_and_mul_torch

pytestmark = pytest.mark.gpu

# Of a value of about 1: the last bit of the format, and a little for another order of summation.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    scale = theirs.float().abs().clamp(min=1.0)
    assert ((ours.float() - theirs.float()).abs() / scale).max() < TOLERANCE[ours.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4096), (3, 11, 1040), (700, 12288)])
def test_silu_and_mul(shape, dtype):
    x = randn(*shape, dtype=dtype)
    assert_close(silu_and_mul(x), silu_and_mul_torch(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (22, 11, 1024), (5, 2048), (3, 200)])
def test_add_rms_norm(shape, dtype):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    for ours, theirs in zip(
        add_rms_norm(x, residual, weight, 1e-5), add_rms_norm_torch(x, residual, weight, 1e-5), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "dim"),
    [(4, 11, 16, 2, 128), (300, 5, 16, 2, 128), (2, 17, 4, 4, 64), (3, 9, 6, 1, 48)],
)
def test_local_attention(batch, tokens, heads, kv_heads, dim, dtype):
    qkv = randn(batch, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(32, dim // 2, device="cuda").repeat(1, 2) * 6
    arguments = (qkv, angles.cos(), angles.sin(), heads, kv_heads, dim**-0.5)
    assert_close(local_attention(*arguments), local_attention_torch(*arguments))
