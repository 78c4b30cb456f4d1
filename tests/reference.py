"""float64 formulas: what every test compares with. Plain torch arithmetic on the inputs as stored.

``layer_norm`` and ``rms_norm`` compute in float64 whatever they are given, keep to the definitions of
``csrc/row_norm.h``, and are differentiable by torch's own autograd. ``residual_sum`` has the bits of the
fused residual operators' sum. ``ulps`` measures an error.
"""

from fractions import Fraction

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


def _dims(x: Tensor, normalized_dims: int) -> list[int]:
    return list(range(x.dim() - normalized_dims, x.dim()))


def _affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    y = x_hat if weight is None else x_hat * (weight.double() + offset)
    return y if bias is None else y + bias.double()


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    normalized_dims: int = 1,
    weight_offset: float = 0.0,
    eps_outside: bool = False,
    unbiased: bool = False,
) -> Tensor:
    """LayerNorm in float64, over the last ``normalized_dims`` dimensions."""
    dims = _dims(x, normalized_dims)
    x = x.double()
    d = x - x.mean(dims, keepdim=True)
    d = d - d.mean(dims, keepdim=True)  # at an offset of 1e6 the first mean is off by 1e-10
    count = d[(0,) * (d.dim() - normalized_dims)].numel() if d.numel() else 1
    # Not torch.var: its running update is off by 10 ulps at 4000 columns, a pairwise sum is not.
    variance = d.square().sum(dims, keepdim=True) / (count - unbiased)
    denominator = variance.sqrt() + eps if eps_outside else (variance + eps).sqrt()
    return _affine(d / denominator, weight, bias, weight_offset)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    normalized_dims: int = 1,
    weight_offset: float = 0.0,
) -> Tensor:
    """RMSNorm in float64; ``eps=None`` is the machine epsilon of the accumulation type of x's dtype."""
    if eps is None:
        eps = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
    dims = _dims(x, normalized_dims)
    x = x.double()
    return _affine(x / (x.square().mean(dims, keepdim=True) + eps).sqrt(), weight, None, weight_offset)


def accumulation(*dtypes: torch.dtype) -> torch.dtype:
    """What values of these dtypes are added in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _to_odd(nearest: Tensor, error: Tensor) -> Tensor:
    """``nearest + error`` rounded to odd instead: a later rounding to fewer bits is then as if it were the
    first."""
    bits = nearest.view(torch.int64 if nearest.dtype == torch.float64 else torch.int32)
    away = (error > 0) == (nearest > 0)
    odd = torch.where((error != 0) & (bits % 2 == 0), torch.where(away, bits + 1, bits - 1), bits)
    return odd.view(nearest.dtype)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)`` for finite values; torch goes from fp64 to 16 bits by way of fp32."""
    if x.dtype != torch.float64 or dtype not in HALVES:
        return x.to(dtype)
    return _to_odd(x.float(), x - x.float()).to(dtype)


def residual_sum(x: Tensor, residual: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha * residual + x``: one fused multiply-add in the wider accumulation type (alpha rounded to it),
    rounded once to the residual's dtype. Exact arithmetic, for finite values."""
    if accumulation(x.dtype, residual.dtype) == torch.float64:
        pairs = zip(residual.double().flatten().tolist(), x.double().flatten().tolist(), strict=True)
        sums = [float(Fraction(alpha) * Fraction(r) + Fraction(v)) for r, v in pairs]
        return round_once(torch.tensor(sums, dtype=torch.float64).reshape(x.shape), residual.dtype)
    # A product of two fp32 is exact in fp64; the sum is that of the exact error of Knuth's TwoSum.
    product, x = torch.tensor(alpha, dtype=torch.float32).double() * residual.double(), x.double()
    total = product + x
    part = total - product
    error = (product - (total - part)) + (x - part)
    return _to_odd(total, error).float().to(residual.dtype)


def unit(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number of ``dtype``."""
    return torch.finfo(dtype).eps


def ulps(actual: Tensor, expected: Tensor, normalized_dims: int = 1) -> float:
    """The largest error, in ulps of ``actual``'s dtype at the row's largest expected value.

    An infinity or a NaN must stand where one is expected; otherwise the error is infinite.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return 0.0
    dtype, actual, expected = actual.dtype, actual.detach().double(), expected.detach().double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (actual - expected).abs())
    dims = _dims(actual, normalized_dims)
    largest = torch.where(expected.isfinite(), expected, 0.0).abs().amax(dims, keepdim=True)
    ulp = largest.clamp_min(torch.finfo(dtype).tiny).log2().floor().exp2() * unit(dtype)
    return float(torch.where(error.isnan(), torch.inf, error / ulp).max())
