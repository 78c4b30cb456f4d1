"""The norms over the trailing dimensions: ``layer_norm``, ``rms_norm``, ``scale_norm``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.torch_support.loading import _C
from fusednorm.torch_support.options import LAYER_NORM, RMS_NORM, takes
from fusednorm.torch_support.subclasses import prepare_for_subclass

__all__ = ["layer_norm", "rms_norm", "scale_norm"]

_is_compiling = torch.compiler.is_compiling
_fast_layer_norm = _C.layer_norm
_fast_rms_norm = _C.rms_norm
_fast_scale_norm = _C.scale_norm


@takes(LAYER_NORM)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> Tensor:
    r"""LayerNorm over the trailing dimensions (Ba, Kiros and Hinton 2016), as ``F.layer_norm``.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w + b

    Args:
        input: ``[*, *normalized_shape]``.
        normalized_shape: the dimensions that make a row.
        weight: of shape ``normalized_shape``, or None for 1.
        bias: of shape ``normalized_shape``, or None for 0.
        eps: added to the variance; any finite number.
        OPTIONS

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
    """
    if not _is_compiling():
        output = _fast_layer_norm(input, normalized_shape, weight, bias, eps, **options)
        if output is not None:
            return output  # type: ignore[no-any-return]
        prepare_for_subclass("layer_norm", input)
    return torch.ops.fusednorm.layer_norm.default(  # type: ignore[no-any-return]
        input, normalized_shape, weight, bias, eps, **options
    )


@takes(RMS_NORM)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""RMSNorm over the trailing dimensions (Zhang and Sennrich 2019), as ``F.rms_norm``.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot w + b

    Args:
        input: ``[*, *normalized_shape]``.
        normalized_shape: the dimensions that make a row.
        weight: of shape ``normalized_shape``, or None for 1.
        eps: added to the mean square; any finite number. None: the machine epsilon of the accumulation
            type, 2**-23 (2**-52 for fp64), as in torch 2.15.
        bias: of shape ``normalized_shape``, or None for 0.
        OPTIONS

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
    """
    if not _is_compiling():
        output = _fast_rms_norm(input, normalized_shape, weight, eps, bias, **options)
        if output is not None:
            return output  # type: ignore[no-any-return]
        prepare_for_subclass("rms_norm", input)
    return torch.ops.fusednorm.rms_norm.default(  # type: ignore[no-any-return]
        input, normalized_shape, weight, eps, bias=bias, **options
    )


def scale_norm(input: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    r"""ScaleNorm over the last dimension (Nguyen and Salazar 2019): a row's direction times one number.

    .. math:: y = g \cdot \frac{x}{\max(\lVert x \rVert_2, \epsilon)}

    Args:
        input: ``[*, N]``.
        g: a tensor of one element, of any of the four dtypes. Its gradient is summed in fp32 (fp64 for fp64)
            over the rows, in fp64 over the columns, and then rounded to its dtype.
        eps: the least that a row is divided by, above 0. Rows no longer than that are multiplied by
            ``g / eps``, and so are their gradients.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout, or eps not above 0.
    """
    if not _is_compiling():
        output = _fast_scale_norm(input, g, eps)
        if output is not None:
            return output  # type: ignore[no-any-return]
        prepare_for_subclass("scale_norm", input)
    return torch.ops.fusednorm.scale_norm.default(input, g, eps)  # type: ignore[no-any-return]
