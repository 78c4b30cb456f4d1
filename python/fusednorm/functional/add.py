"""The norms over rows with the residual add in front of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.torch_support.loading import _C
from fusednorm.torch_support.options import LAYER_NORM, RMS_NORM, takes
from fusednorm.torch_support.subclasses import prepare_for_subclass

__all__ = ["add_layer_norm", "add_rms_norm"]

_is_compiling = torch.compiler.is_compiling
_fast_add_layer_norm = _C.add_layer_norm
_fast_add_rms_norm = _C.add_rms_norm


@takes(LAYER_NORM)
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    alpha: float = 1.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    r"""The residual add and the LayerNorm after it in one: a block's output joins the residual stream.

    .. math:: s = \alpha \cdot r + x, \qquad y = \mathrm{LayerNorm}(s)

    The sum is one fused multiply-add in the wider accumulation type of the two, rounded once to the
    residual's dtype; the norm is that of ``s`` as stored. An fp32 stream may run beside bf16 activations.

    Args:
        input: ``[*, *normalized_shape]``, what is added to the stream (a sublayer's output).
        residual: the stream, of the input's shape and any of the four dtypes.
        normalized_shape, weight, bias, eps: see :func:`layer_norm`.
        alpha: the factor on the residual (DeepNorm's alpha, Wang et al. 2022); any finite number.
        OPTIONS

    Returns:
        ``(output, residual_out)``: ``y`` of the input's dtype, and ``s`` of the residual's. Both are
        contiguous. Backward takes gradients of either or both, and keeps ``s``, not its addends: changing
        ``s`` in place before backward is an error.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout. The residual is not broadcast.

    For inference ``torch.ops.fusednorm.add_layer_norm_`` writes ``s`` over the residual and returns ``y``.
    """
    if not _is_compiling():
        outputs = _fast_add_layer_norm(input, residual, normalized_shape, weight, bias, eps, alpha, **options)
        if outputs is not None:
            return outputs  # type: ignore[no-any-return]
        prepare_for_subclass("add_layer_norm", input)
    return torch.ops.fusednorm.add_layer_norm.default(  # type: ignore[no-any-return]
        input,
        residual,
        normalized_shape,
        weight,
        bias,
        eps,
        alpha=alpha,
        **options,
    )


@takes(RMS_NORM)
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    r"""The residual add and the RMSNorm after it in one: a block's output joins the residual stream.

    .. math:: s = \alpha \cdot r + x, \qquad y = \mathrm{RMSNorm}(s)

    The sum is one fused multiply-add in the wider accumulation type of the two, rounded once to the
    residual's dtype; the norm is that of ``s`` as stored. An fp32 stream may run beside bf16 activations.

    Args:
        input: ``[*, *normalized_shape]``, what is added to the stream (a sublayer's output).
        residual: the stream, of the input's shape and any of the four dtypes.
        normalized_shape, weight: see :func:`rms_norm`.
        eps: see :func:`rms_norm`. None: the machine epsilon of what the residual accumulates in.
        alpha: the factor on the residual; any finite number.
        bias: see :func:`rms_norm`.
        OPTIONS

    Returns:
        ``(output, residual_out)``: ``y`` of the input's dtype, and ``s`` of the residual's; see
        :func:`add_layer_norm`.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout. The residual is not broadcast.

    For inference ``torch.ops.fusednorm.add_rms_norm_`` writes ``s`` over the residual and returns ``y``.
    """
    if not _is_compiling():
        outputs = _fast_add_rms_norm(input, residual, normalized_shape, weight, eps, alpha, bias, **options)
        if outputs is not None:
            return outputs  # type: ignore[no-any-return]
        prepare_for_subclass("add_rms_norm", input)
    return torch.ops.fusednorm.add_rms_norm.default(  # type: ignore[no-any-return]
        input,
        residual,
        normalized_shape,
        weight,
        eps,
        alpha=alpha,
        bias=bias,
        **options,
    )
