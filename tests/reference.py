"""float64 formulas: what every test compares with. Plain torch arithmetic on the inputs as stored.

``layer_norm`` and ``rms_norm`` compute in float64 whatever they are given, keep to the definitions of
``csrc/row_norm.h``, and are differentiable by torch's own autograd. ``ulps`` measures an error.
"""

from collections.abc import Callable

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
