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
) -> Tensor:
    x, gain, shift = _wide(input, input), _wide(input, weight, weight_offset), _wide(input, bias)
    assert x is not None
    if not (eps_outside or unbiased):
        return F.layer_norm(x, normalized_shape, gain, shift, eps).to(input.dtype)
    dims = tuple(range(-len(normalized_shape), 0))
    variance = x.var(dims, correction=int(unbiased), keepdim=True)
    x = x - x.mean(dims, keepdim=True)
    y = x / (variance.sqrt() + eps) if eps_outside else x * (variance + eps).rsqrt()
    y = y if gain is None else y * gain
    return (y if shift is None else y + shift).to(input.dtype)


def _rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    weight_offset: float = 0.0,
    casting_mode: str = "default",
) -> Tensor:
    x, gain = _wide(input, input), _wide(input, weight, weight_offset)
    assert x is not None
    if eps is None:  # torch before 2.15 took the input's own epsilon
        eps = 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    if casting_mode == "default":
        return F.rms_norm(x, normalized_shape, gain, eps).to(input.dtype)
    x_hat = F.rms_norm(x, normalized_shape, None, eps).to(input.dtype)  # "llama" rounds here, too
    return x_hat if gain is None else (x_hat * gain).to(input.dtype)


def decompositions() -> dict[Any, Callable[..., Tensor]]:
    """A table for ``ExportedProgram.run_decompositions``: each of our operators as torch's own."""
    ops = torch.ops.fusednorm
    return {ops.layer_norm.default: _layer_norm, ops.rms_norm.default: _rms_norm}
