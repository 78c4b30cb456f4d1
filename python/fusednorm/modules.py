"""The norms as modules: ``torch.nn``'s classes with another ``forward``.

An existing module becomes one of ours by its class alone, and keeps parameters, hooks, flags and sharing::

    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = fusednorm.LayerNorm

They are subclasses, so what looks for ``nn.LayerNorm`` or ``nn.RMSNorm`` (optimizer groups, quantizers,
``isinstance``) finds them, and a strict ``load_state_dict`` passes both ways.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm import functional

__all__ = ["LayerNorm", "RMSNorm"]

_MACHINE_EPSILON = {torch.float64: 2.0**-52}  # of the accumulation type; all others accumulate in fp32


def _extra_repr(base: str, **options: tuple[Any, Any]) -> str:
    """torch's repr, with those of our options that differ from their defaults behind it."""
    changed = [f"{name}={given!r}" for name, (given, default) in options.items() if given != default]
    return ", ".join([base, *changed])


def _check_input_scale(module: str, input_scale: float) -> None:
    if not 0 < input_scale < float("inf"):
        raise ValueError(f"fusednorm.{module}: input_scale: expected a positive number, got {input_scale}")


class LayerNorm(nn.LayerNorm):
    r"""``nn.LayerNorm`` on the fused kernels (Ba, Kiros and Hinton 2016).

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w + b

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``nn.LayerNorm``.
        weight_offset, eps_outside, unbiased: see :func:`fusednorm.functional.layer_norm`.
        init_gain: what the gain ``weight_offset + weight`` starts at (0.1 calms early training).
        input_scale: a factor c on the input. ``Norm(c x; eps) = Norm(x; eps / c**2)`` (``eps / c`` with
            eps_outside), so it changes eps and costs nothing.

    Shape:
        input ``[*, *normalized_shape]``, output the same.
    """

    # The defaults of a module that became ours by its class.
    weight_offset: float = 0.0
    eps_outside: bool = False
    unbiased: bool = False
    init_gain: float = 1.0
    input_scale: float = 1.0

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        eps_outside: bool = False,
        unbiased: bool = False,
        init_gain: float = 1.0,
        input_scale: float = 1.0,
    ) -> None:
        _check_input_scale("LayerNorm", input_scale)
        self.weight_offset = weight_offset
        self.eps_outside = eps_outside
        self.unbiased = unbiased
        self.init_gain = init_gain
        self.input_scale = input_scale
        shape: Any = normalized_shape  # torch's own annotation differs between versions
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to ``init_gain - weight_offset`` and the bias to 0."""
        super().reset_parameters()
        if self.elementwise_affine:
            nn.init.constant_(self.weight, self.init_gain - self.weight_offset)

    def _scaled_eps(self) -> float:
        if self.input_scale == 1.0:
            return self.eps
        return self.eps / (self.input_scale if self.eps_outside else self.input_scale**2)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, *normalized_shape]``."""
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self._scaled_eps(),
            weight_offset=self.weight_offset,
            eps_outside=self.eps_outside,
            unbiased=self.unbiased,
        )

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        return _extra_repr(
            super().extra_repr(),
            weight_offset=(self.weight_offset, 0.0),
            eps_outside=(self.eps_outside, False),
            unbiased=(self.unbiased, False),
            init_gain=(self.init_gain, 1.0),
            input_scale=(self.input_scale, 1.0),
        )


class RMSNorm(nn.RMSNorm):
    r"""``nn.RMSNorm`` on the fused kernels (Zhang and Sennrich 2019).

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot w

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``nn.RMSNorm``. ``eps=None`` is the
            machine epsilon of the accumulation type.
        weight_offset, casting_mode: see :func:`fusednorm.functional.rms_norm`.
        init_gain: what the gain ``weight_offset + weight`` starts at.
        input_scale: a factor c on the input, as an eps of ``eps / c**2``; see :class:`LayerNorm`.

    Shape:
        input ``[*, *normalized_shape]``, output the same.
    """

    # The defaults of a module that became ours by its class.
    weight_offset: float = 0.0
    casting_mode: str = "default"
    init_gain: float = 1.0
    input_scale: float = 1.0

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        casting_mode: str = "default",
        init_gain: float = 1.0,
        input_scale: float = 1.0,
    ) -> None:
        _check_input_scale("RMSNorm", input_scale)
        if casting_mode not in ("default", "llama"):
            raise ValueError(
                f'fusednorm.RMSNorm: casting_mode: expected "default" or "llama", got {casting_mode!r}'
            )
        self.weight_offset = weight_offset
        self.casting_mode = casting_mode
        self.init_gain = init_gain
        self.input_scale = input_scale
        shape: Any = normalized_shape  # torch's own annotation differs between versions
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Sets the weight to ``init_gain - weight_offset``."""
        super().reset_parameters()
        if self.elementwise_affine:
            nn.init.constant_(self.weight, self.init_gain - self.weight_offset)

    def _scaled_eps(self, rows: Tensor) -> float | None:
        if self.input_scale == 1.0:
            return self.eps
        eps = _MACHINE_EPSILON.get(rows.dtype, 2.0**-23) if self.eps is None else self.eps
        return eps / self.input_scale**2

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, *normalized_shape]``."""
        return functional.rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self._scaled_eps(input),
            weight_offset=self.weight_offset,
            casting_mode=self.casting_mode,
        )

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        return _extra_repr(
            super().extra_repr(),
            weight_offset=(self.weight_offset, 0.0),
            casting_mode=(self.casting_mode, "default"),
            init_gain=(self.init_gain, 1.0),
            input_scale=(self.input_scale, 1.0),
        )
