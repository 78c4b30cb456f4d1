"""Our operators in terms of torch's, for exporters that know torch's operators only (ONNX, for one).

.. code:: python

    program = torch.export.export(model, inputs).run_decompositions(fusednorm.decompositions())
    torch.onnx.export(program, ...)

The result computes the same formula with the same eps; its rounding is torch's, not ours.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["decompositions"]


def _wide(input: Tensor, tensor: Tensor | None, offset: float = 0.0) -> Tensor | None:
    """A tensor in the type that rows of ``input`` accumulate in; weights and biases may be of any dtype."""
    if tensor is None:
        return None
    wide = tensor.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    return wide if offset == 0.0 else wide + offset


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    eps_outside: bool = False,
    unbiased: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out_dtype = out_dtype or input.dtype
    x, gain, shift = _wide(input, input), _wide(input, weight, weight_offset), _wide(input, bias)
    assert x is not None
    if not (eps_outside or unbiased):
        return F.layer_norm(x, normalized_shape, gain, shift, eps).to(out_dtype)
    dims = tuple(range(-len(normalized_shape), 0))
    variance = x.var(dims, correction=int(unbiased), keepdim=True)
    x = x - x.mean(dims, keepdim=True)
    y = x / (variance.sqrt() + eps) if eps_outside else x * (variance + eps).rsqrt()
    y = y if gain is None else y * gain
    return (y if shift is None else y + shift).to(out_dtype)


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    casting_mode: str = "default",
    eps_outside: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out_dtype = out_dtype or input.dtype
    x, gain, shift = _wide(input, input), _wide(input, weight, weight_offset), _wide(input, bias)
    assert x is not None
    if eps is None:  # torch before 2.15 took the input's own epsilon
        eps = 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    if casting_mode == "default" and not eps_outside:
        y = F.rms_norm(x, normalized_shape, gain, eps)
        return (y if shift is None else y + shift).to(out_dtype)
    if eps_outside:
        square = x.square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
        x_hat = x / (square.sqrt() + eps)
    else:
        x_hat = F.rms_norm(x, normalized_shape, None, eps)
    if casting_mode == "llama":
        x_hat = x_hat.to(input.dtype)  # rounds here, too
    y = x_hat if gain is None else x_hat * gain
    return (y if shift is None else y + shift).to(out_dtype)


def _scale_rows(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    x, gain = _wide(input, input), _wide(input, weight)
    assert x is not None
    y = F.normalize(x, dim=tuple(range(-len(normalized_shape), 0)), eps=eps)  # type: ignore[arg-type]
    return (y if gain is None else y * gain).to(out_dtype or input.dtype)


def _scale_norm(input: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    return _scale_rows(input, input.shape[-1:], g.reshape(1), eps)


def _with_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The fused residual operator of a norm, in two steps."""

    def add_norm(
        input: Tensor, residual: Tensor, normalized_shape: Any, *args: Any, alpha: float = 1.0, **options: Any
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if torch.float64 in (input.dtype, residual.dtype) else torch.float32
        residual_out = torch.add(input.to(wide), residual.to(wide), alpha=alpha).to(residual.dtype)
        output = norm(residual_out, normalized_shape, *args, **options, out_dtype=input.dtype)
        return output, residual_out

    return add_norm


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for ``ExportedProgram.run_decompositions``: each of our operators as torch's own."""
    ops = torch.ops.fusednorm
    return {
        ops.layer_norm.default: _layer_norm,
        ops.rms_norm.default: _rms_norm,
        ops.scale_norm.default: _scale_norm,
        ops._scale_rows.default: _scale_rows,
        ops.add_layer_norm.default: _with_sum(_layer_norm),
        ops.add_rms_norm.default: _with_sum(_rms_norm),
    }
