"""float64 formulas: what every test compares with. Plain torch arithmetic on the inputs as stored.

``layer_norm`` and ``rms_norm`` compute in float64 whatever they are given, keep to the definitions of
``csrc/maths/row_norm.h``, and are differentiable by torch's own autograd. ``residual_sum`` has the bits of
the fused residual operators' sum. ``ulps`` measures an error.
"""

from collections.abc import Callable
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
    eps_outside: bool = False,
) -> Tensor:
    """RMSNorm in float64; ``eps=None`` is the machine epsilon of the accumulation type of x's dtype."""
    if eps is None:
        eps = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
    dims = _dims(x, normalized_dims)
    x = x.double()
    square = x.square().mean(dims, keepdim=True)
    denominator = square.sqrt() + eps if eps_outside else (square + eps).sqrt()
    return _affine(x / denominator, weight, None, weight_offset)


def scale_norm(x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """ScaleNorm in float64, over the last dimension; g has one element."""
    x = x.double()
    # Scaled by a constant, so that squares neither over- nor underflow; the root is not taken of 0.
    largest = x.detach().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    squares = (x / largest).square().sum(-1, keepdim=True)
    length = largest * squares.masked_fill(squares == 0, 1).sqrt()
    return g.double().reshape(()) * (x / length.clamp_min(eps))


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


def blocks(x: Tensor) -> list[slice]:
    """``x``'s first dimension in parts of at most 2**18 elements: float64 formulas of 17 million elements at
    once pass 130 MB to and fro with each operation, in parts they stay in the cache (9.3 s against 2)."""
    step = max(1, 2**18 * x.shape[0] // max(1, x.numel()))
    return [slice(begin, begin + step) for begin in range(0, max(1, x.shape[0]), step)]


def bound(want: Tensor, terms: Tensor, dtype: torch.dtype, acc: torch.dtype, factor: float) -> Tensor:
    """The error allowed to a gradient of ``dtype`` that is summed from ``terms`` in ``acc``.

    ``factor`` ulps of the largest of the terms, not of the sum: they may cancel to nothing, in any
    arithmetic. 16-bit gradients are rounded once more, at the store: half an ulp of their own.
    """
    allowed = factor * unit(acc) * terms
    if dtype != acc:
        allowed = allowed + 0.51 * unit(dtype) * want.abs() + torch.finfo(dtype).tiny
    return allowed


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm in float64 over all but the last dimension; also the mean and the unbiased variance.

    Statistics are those of the positions that ``mask`` has; the others are normalized by them as constants.
    """
    x = x.double()
    real = x.flatten(0, -2) if mask is None else x[mask]
    mean = real.mean(0)
    d = real - mean
    mean = mean + d.mean(0)  # see layer_norm
    variance = (real - mean).square().sum(0) / real.shape[0]
    rstd = (variance + eps).rsqrt()
    x_hat = (x - mean) * rstd
    if mask is not None:
        x_hat = torch.where(mask.unsqueeze(-1), x_hat, (x - mean.detach()) * rstd.detach())
    unbiased = variance * (real.shape[0] / (real.shape[0] - 1))
    return _affine(x_hat, weight, bias, 0.0), mean, unbiased


class PowerNorm:
    """PowerNorm's recurrences in float64, step by step: ``forward`` gives a step, ``backward`` takes it."""

    def __init__(self, features: int, eps: float, a_forward: float, a_backward: float, warmup: int) -> None:
        self.psi_square, self.nu = torch.ones(features).double(), torch.zeros(features).double()
        self.eps, self.a_forward, self.a_backward, self.warmup, self.steps = (
            eps,
            a_forward,
            a_backward,
            warmup,
            0,
        )

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the psi squared that made it."""
        real = x.double()[mask if mask is not None else torch.ones(x.shape[:-1], dtype=torch.bool)]
        square = real.square().mean(0)
        self.steps += 1
        if self.steps <= self.warmup:
            used = square
            self.psi_square = self.psi_square + (square - self.psi_square) / self.steps
        else:
            used = self.psi_square
            self.psi_square = self.a_forward * self.psi_square + (1 - self.a_forward) * square
        return self.evaluate(x, weight, bias, used), used

    def evaluate(self, x: Tensor, weight: Tensor, bias: Tensor, psi_square: Tensor | None = None) -> Tensor:
        psi_square = self.psi_square if psi_square is None else psi_square
        return x.double() / (psi_square + self.eps).sqrt() * weight.double() + bias.double()

    def backward(
        self, x: Tensor, weight: Tensor, used: Tensor, grad: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of input, weight and bias for a forward that used that psi squared."""
        real = mask if mask is not None else torch.ones(x.shape[:-1], dtype=torch.bool)
        root = (used + self.eps).sqrt()
        x_hat, grad = x.double() / root, grad.double()
        g = grad * weight.double()
        grad_input = (g - self.nu * x_hat * real.unsqueeze(-1)) / root
        step = 1 - self.a_backward
        self.nu = self.nu * (1 - step * x_hat[real].square().mean(0)) + step * (g * x_hat)[real].mean(0)
        return grad_input, (grad * x_hat).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


def group_scaling(x: Tensor, groups: int, eps: float) -> Tensor:
    """Features in groups, each over the root of its mean square plus eps."""
    return rms_norm(x.unflatten(-1, (groups, -1)), eps=eps).flatten(-2)


def residual(
    x: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    placement: str,
    norm: Callable[[Tensor], Tensor],
    norm2: Callable[[Tensor], Tensor] | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """One sublayer and its residual in float64, as defined; ``norm`` and ``norm2`` are float64 formulas."""
    x = x.double()
    if placement == "pre":
        return x + sublayer(norm(x))
    if placement == "sandwich":
        assert norm2 is not None
        return x + norm2(sublayer(norm(x)))
    return norm(alpha * x + sublayer(x))


def warm_norm(x: Tensor, progress: float, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """A norm ``progress`` (0 to 1) of the way through its warm-up by lambda, in float64."""
    return progress * norm(x) + (1 - progress) * x.double()


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """GroupNorm of ``[N, C, *]`` in float64; ``layer_norm`` of each sample's groups."""
    cols = x.shape[1] // groups * x[0, 0].numel() if x.numel() else 1
    x_hat = layer_norm(x.reshape(-1, groups, cols), eps=eps).reshape(x.shape)
    per_channel = (-1,) + (1,) * (x.dim() - 2)
    weight, bias = (p if p is None else p.reshape(per_channel) for p in (weight, bias))
    return _affine(x_hat, weight, bias, 0.0)


def head_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "rms",
    head_axis: int = -2,
    eps: float | None = 1e-6,
) -> Tensor:
    """A norm over the last dimension in float64, then weight and bias ``[H, D]`` of the head."""
    x_hat = rms_norm(x, eps=eps) if kind == "rms" else layer_norm(x, eps=eps)
    if head_axis == -3:
        weight, bias = (p if p is None else p.unsqueeze(-2) for p in (weight, bias))
    return _affine(x_hat, weight, bias, 0.0)
