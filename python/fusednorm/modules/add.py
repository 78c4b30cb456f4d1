"""The norms with the residual add in front of them: ``forward(input, residual)``.

In a Pre-Norm model the sum that leaves one block is what the next block's norm reads, so the two make one
pass over memory::

    y, stream = norm(sublayer_output, stream)  # stream = stream + sublayer_output; y = Norm(stream)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.modules.rows import LayerNorm, RMSNorm

__all__ = ["AddLayerNorm", "AddRMSNorm"]


def _check_alpha(module: str, alpha: float) -> None:
    if not math.isfinite(alpha):
        raise ValueError(f"fusednorm.{module}: alpha: expected a finite number, got {alpha}")


def _with_alpha(text: str, alpha: float) -> str:
    return text if alpha == 1.0 else f"{text}, alpha={alpha!r}"


class AddLayerNorm(LayerNorm):
    r"""The residual add and LayerNorm in one; parameters and state_dict are those of ``nn.LayerNorm``.

    .. math:: s = \alpha \cdot r + x, \qquad y = \mathrm{LayerNorm}(s)

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``nn.LayerNorm``.
        alpha: the factor on the residual; see :func:`fusednorm.functional.add_layer_norm`.
        options: the keyword options of :class:`fusednorm.LayerNorm`. input_scale is a factor on ``s``.

    Shape:
        input and residual ``[*, *normalized_shape]``; returns ``(output, residual_out)`` of that shape, the
        first of the input's dtype, the second of the residual's.
    """

    __module__ = "fusednorm"  # what pickles call it

    alpha: float = 1.0  # of a module that became ours by its class

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        alpha: float = 1.0,
        **options: Any,
    ) -> None:
        _check_alpha("AddLayerNorm", alpha)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, **options)
        self.alpha = alpha

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the norm of ``alpha * residual + input``, and that sum."""
        return self._norm_of_sum(input, residual, self.alpha)

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        return _with_alpha(super().extra_repr(), self.alpha)


class AddRMSNorm(RMSNorm):
    r"""The residual add and RMSNorm in one; parameters and state_dict are those of ``nn.RMSNorm``.

    .. math:: s = \alpha \cdot r + x, \qquad y = \mathrm{RMSNorm}(s)

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``nn.RMSNorm``. ``eps=None`` is the
            machine epsilon of what the residual accumulates in.
        alpha: the factor on the residual; see :func:`fusednorm.functional.add_rms_norm`.
        options: the keyword options of :class:`fusednorm.RMSNorm`. input_scale is a factor on ``s``.

    Shape:
        input and residual ``[*, *normalized_shape]``; returns ``(output, residual_out)`` of that shape, the
        first of the input's dtype, the second of the residual's.
    """

    __module__ = "fusednorm"  # what pickles call it

    alpha: float = 1.0  # of a module that became ours by its class

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        alpha: float = 1.0,
        **options: Any,
    ) -> None:
        _check_alpha("AddRMSNorm", alpha)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self.alpha = alpha

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the norm of ``alpha * residual + input``, and that sum."""
        return self._norm_of_sum(input, residual, self.alpha)

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        return _with_alpha(super().extra_repr(), self.alpha)
