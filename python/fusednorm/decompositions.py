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


def _gain(weight: Tensor | None, offset: float) -> Tensor | None:
    return weight if weight is None or offset == 0.0 else weight + offset


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    eps_outside: bool = False,
    unbiased: bool = False,
) -> Tensor:
    gain = _gain(weight, weight_offset)
    if not (eps_outside or unbiased):
        return F.layer_norm(input, normalized_shape, gain, bias, eps)
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    variance = input.var(dims, correction=int(unbiased), keepdim=True)
    y = centred / (variance.sqrt() + eps) if eps_outside else centred * (variance + eps).rsqrt()
    y = y if gain is None else y * gain
    return y if bias is None else y + bias


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    casting_mode: str = "default",
) -> Tensor:
    if eps is None:  # torch before 2.15 took the input's own epsilon
        eps = 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    gain = _gain(weight, weight_offset)
    if casting_mode == "default":
        return F.rms_norm(input, normalized_shape, gain, eps)
    x_hat = F.rms_norm(input, normalized_shape, None, eps)  # rounded to the input's dtype, as "llama" says
    return x_hat if gain is None else (x_hat * gain).to(input.dtype)


def decompositions() -> dict[Any, Callable[..., Tensor]]:
    """A table for ``ExportedProgram.run_decompositions``: each of our operators as torch's own."""
    ops = torch.ops.fusednorm
    return {ops.layer_norm.default: _layer_norm, ops.rms_norm.default: _rms_norm}
