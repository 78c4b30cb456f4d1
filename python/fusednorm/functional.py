"""The norms as functions, in the argument order of ``torch.nn.functional``; our options are keyword-only.

All of them take fp64, fp32, bf16 and fp16 on any strides, with weight and bias of any of the four dtypes;
keep statistics and sums in fp32 (fp64 for fp64); and return a contiguous tensor of the input's shape and
dtype. A wrong shape, dtype, device or layout raises a ``RuntimeError`` that names the operator, the
argument, what was expected and what was given.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm._load import _C

__all__ = ["layer_norm", "rms_norm"]

_is_compiling = torch.compiler.is_compiling
_fast_layer_norm = _C.layer_norm
_fast_rms_norm = _C.rms_norm


def _prepare_for_subclass(op: str, input: Tensor) -> None:
    """DTensor learns our operators when it first arrives; jagged tensors, which could not, are refused."""
    if isinstance(input, Tensor) and input.is_nested:
        raise RuntimeError(f"fusednorm::{op}: input: expected a dense (strided) tensor, got a nested tensor")
    if "torch.distributed.tensor" in sys.modules:
        from fusednorm import distributed

        distributed.register()


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    eps_outside: bool = False,
    unbiased: bool = False,
) -> Tensor:
    r"""LayerNorm over the trailing dimensions (Ba, Kiros and Hinton 2016), as ``F.layer_norm``.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w + b

    Args:
        input: ``[*, *normalized_shape]``.
        normalized_shape: the dimensions that make a row.
        weight: of shape ``normalized_shape``, or None for 1.
        bias: of shape ``normalized_shape``, or None for 0.
        eps: added to the variance; any finite number.
        weight_offset: the gain is ``weight_offset + weight``, formed in the accumulation type (1: NVIDIA's
            zero-centred gamma). A plain checkpoint's weights of 1 would give a gain of 2: subtract it.
        eps_outside: divide by ``s + eps`` in place of ``sqrt(s**2 + eps)``, as in the "annotated
            Transformer". Where ``s`` is 0 its derivative is taken as 0.
        unbiased: variance over N - 1, as in the "annotated Transformer"; needs rows of 2 elements or more.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
    """
    if not _is_compiling():
        output = _fast_layer_norm(
            input, normalized_shape, weight, bias, eps, weight_offset, eps_outside, unbiased
        )
        if output is not None:
            return output  # type: ignore[no-any-return]
        _prepare_for_subclass("layer_norm", input)
    return torch.ops.fusednorm.layer_norm.default(  # type: ignore[no-any-return]
        input,
        normalized_shape,
        weight,
        bias,
        eps,
        weight_offset=weight_offset,
        eps_outside=eps_outside,
        unbiased=unbiased,
    )


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    casting_mode: str = "default",
) -> Tensor:
    r"""RMSNorm over the trailing dimensions (Zhang and Sennrich 2019), as ``F.rms_norm``.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot w

    Args:
        input: ``[*, *normalized_shape]``.
        normalized_shape: the dimensions that make a row.
        weight: of shape ``normalized_shape``, or None for 1.
        eps: added to the mean square; any finite number. None: the machine epsilon of the accumulation
            type, 2**-23 (2**-52 for fp64), as in torch 2.15.
        weight_offset: the gain is ``weight_offset + weight``, formed in the accumulation type (1: Gemma's
            form). A plain checkpoint's weights of 1 would give a gain of 2: subtract it.
        casting_mode: "default" rounds once, at the store. "llama" rounds ``x * rstd`` to the input's dtype
            before the product with the weight, as Hugging Face's ``LlamaRMSNorm`` does.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
    """
    if not _is_compiling():
        output = _fast_rms_norm(input, normalized_shape, weight, eps, weight_offset, casting_mode)
        if output is not None:
            return output  # type: ignore[no-any-return]
        _prepare_for_subclass("rms_norm", input)
    return torch.ops.fusednorm.rms_norm.default(  # type: ignore[no-any-return]
        input,
        normalized_shape,
        weight,
        eps,
        weight_offset=weight_offset,
        casting_mode=casting_mode,
    )
