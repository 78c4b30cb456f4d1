"""A norm of variable strength: between the input as it is and the input normalized."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm.modules.batch_norm import BatchNorm
from fusednorm.modules.columns import accumulation_type
from fusednorm.modules.power_norm import PowerNorm

__all__ = ["AdaptiveNorm"]


class AdaptiveNorm(nn.Module):
    r"""How much to normalize, learned or scheduled, around any norm of one input.

    .. math:: y = (\lambda \, \mathrm{Norm}(x) + (1 - \lambda) \, x) \cdot w + b

    The mix and the affine are computed in fp32 (fp64 for fp64) and rounded once, to the input's dtype.

    Args:
        norm: any module whose ``forward(input)`` returns the shape it was given; it may also take a mask.
        strength: :math:`\lambda` at first, from 0 to 1.
        learnable: :math:`\lambda` is the sigmoid of the parameter ``theta`` and never quite 0 or 1.
            Otherwise it is the buffer ``fixed_strength``, for a schedule to set by :meth:`set_strength`.
        affine: weight and bias behind the mix. Those of ``norm`` are *moved* here: the same parameters, and
            ``norm`` has none afterwards. For a norm without any they are made, 1 and 0, in the shape of its
            features. False: nothing behind the mix, and ``norm`` keeps what it has.
        device, dtype: of what is made here; theta and the strength of 16-bit modules are fp32.

    Shape:
        as ``norm``'s; ``mask``, where given, is passed on to it.

    Raises:
        ValueError: a strength out of range; with affine, a norm whose features are not known, or whose
            ``weight_offset`` or ``casting_mode`` ties its weight to its own formula.
    """

    __module__ = "fusednorm"  # what pickles call it

    theta: nn.Parameter
    fixed_strength: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        norm: nn.Module,
        strength: float = 0.5,
        learnable: bool = True,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if affine:
            _check_movable(norm)
        self.norm = norm
        self.initial_strength = strength
        self.learnable = learnable
        self.affine = affine
        wide = accumulation_type(dtype or torch.get_default_dtype())
        start = torch.empty((), device=device, dtype=wide)
        if learnable:
            self.theta = nn.Parameter(start)
        else:
            self.register_buffer("fixed_strength", start)
        self.set_strength(strength)
        # A norm over channels has them in dimension 1, but for our column norms; others end in their shape.
        self._channels_first = not hasattr(norm, "normalized_shape") and not isinstance(
            norm, (BatchNorm, PowerNorm)
        )
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if affine and weight is None:
            weight = nn.Parameter(torch.ones(_features(norm), device=device, dtype=dtype))
            bias = nn.Parameter(torch.zeros(_features(norm), device=device, dtype=dtype))
        elif affine:
            for name in ("weight", "bias"):
                norm.register_parameter(name, None)
            for name in ("affine", "elementwise_affine"):
                if hasattr(norm, name):
                    setattr(norm, name, False)  # its reset_parameters has nothing to reset
        self.register_parameter("weight", weight if affine else None)
        self.register_parameter("bias", bias if affine else None)

    def reset_parameters(self) -> None:
        """Weight 1, bias 0, and the strength that the module was made with."""
        self.set_strength(self.initial_strength)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def strength(self) -> Tensor:
        """lambda, as a tensor of no dimensions."""
        return self.theta.sigmoid() if self.learnable else self.fixed_strength

    def set_strength(self, strength: float) -> None:
        """Sets lambda: by a schedule, from 0 to 1; where it is learnable, a new start strictly between."""
        if self.learnable and not 0 < strength < 1:
            raise ValueError(
                "fusednorm.AdaptiveNorm: strength: expected a number between 0 and 1, which a learnable one "
                f"does not reach, got {strength}"
            )
        if not 0 <= strength <= 1:
            raise ValueError(
                f"fusednorm.AdaptiveNorm: strength: expected a number from 0 to 1, got {strength}"
            )
        with torch.no_grad():
            if self.learnable:
                self.theta.fill_(math.log(strength) - math.log1p(-strength))
            else:
                self.fixed_strength.fill_(strength)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mixes ``input`` with what the norm makes of it; a mask is for the norm."""
        normalized = self.norm(input) if mask is None else self.norm(input, mask)
        wide = accumulation_type(input.dtype)
        y = torch.lerp(input.to(wide), normalized.to(wide), self.strength.to(wide))  # exact at 0 and at 1
        if self.weight is not None:
            y = y * self._over(self.weight, y)
        if self.bias is not None:
            y = y + self._over(self.bias, y)
        return y.to(input.dtype)

    def _over(self, parameter: Tensor, y: Tensor) -> Tensor:
        return parameter.view(-1, *[1] * (y.dim() - 2)) if self._channels_first else parameter

    def extra_repr(self) -> str:
        """The options."""
        return f"strength={self.initial_strength}, learnable={self.learnable}, affine={self.affine}"


def _check_movable(norm: nn.Module) -> None:
    for name, plain in (("weight_offset", 0.0), ("casting_mode", "default")):
        if getattr(norm, name, plain) != plain:
            raise ValueError(
                f"fusednorm.AdaptiveNorm: norm: expected {name}={plain!r}, since its weight moves behind the "
                f"mix, got {getattr(norm, name)!r}; affine=False leaves the weight where it is"
            )


def _features(norm: nn.Module) -> Any:
    for name in ("normalized_shape", "num_features", "num_channels"):
        if hasattr(norm, name):
            return getattr(norm, name)
    raise ValueError(
        "fusednorm.AdaptiveNorm: norm: expected a weight, normalized_shape, num_features or num_channels to "
        f"tell the shape of the affine, got {type(norm).__name__}; affine=False does without"
    )
