"""LayerNorm and RMSNorm: the norms over rows, on which others here are built."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm import functional
from fusednorm.torch_support.loading import _C
from fusednorm.torch_support.options import LAYER_NORM, RMS_NORM, Options, module_of

__all__ = ["LayerNorm", "RMSNorm"]

_MACHINE_EPSILON = {torch.float64: 2.0**-52}  # of the accumulation type; all others accumulate in fp32


def _extra_repr(base: str, **options: tuple[Any, Any]) -> str:
    """torch's repr, with those of our options that differ from their defaults behind it."""
    changed = [f"{name}={given!r}" for name, (given, default) in options.items() if given != default]
    return ", ".join([base, *changed])


# A small batch pays for the way to the kernel (1 x 64 without grad: 3.1 us through the function, 2.0 so,
# nn.LayerNorm 4.1): modules call the fast entry themselves, and read their parameters where nn.Module keeps
# them, for its attribute lookup takes 0.3 us each. Where parameters are something else (a parametrization, a
# replica of DataParallel) they are looked up, and what the fast entry steps aside for goes to the function.
_is_compiling = torch.compiler.is_compiling
_fast_layer_norm = _C.layer_norm
_fast_rms_norm = _C.rms_norm


class _RowNorm(nn.Module):
    """What the norms over rows share: the options of their operators, and what else a module may be told."""

    _options: Options
    # The defaults of a module that became ours by its class; those of the options are set by module_of.
    init_gain: float = 1.0
    input_scale: float = 1.0

    def _set_options(self, given: dict[str, Any], init_gain: float, input_scale: float) -> None:
        if not 0 < input_scale < float("inf"):
            raise ValueError(
                f"fusednorm.{type(self).__name__}: input_scale: expected a positive number, got {input_scale}"
            )
        self._options.set(self, given)
        self.init_gain = init_gain
        self.input_scale = input_scale

    def reset_parameters(self) -> None:
        """Sets the weight to ``init_gain - weight_offset``, and a bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.elementwise_affine:
            nn.init.constant_(self.weight, self.init_gain - self.weight_offset)  # type: ignore[arg-type, operator]

    def _divided(self, eps: float) -> float:
        """eps, as the factor on the input changes it: outside the root it scales as the input does."""
        scale: float = self.input_scale
        return eps / (scale if getattr(self, "eps_outside", False) else scale**2)

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        options = {name: (getattr(self, name), plain) for name, plain in self._options.defaults.items()}
        options |= {"init_gain": (self.init_gain, 1.0), "input_scale": (self.input_scale, 1.0)}
        return _extra_repr(super().extra_repr(), **options)


@module_of(LAYER_NORM)
class LayerNorm(_RowNorm, nn.LayerNorm):
    r"""``nn.LayerNorm`` on the fused kernels (Ba, Kiros and Hinton 2016).

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w + b

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``nn.LayerNorm``.
        options: those of :func:`fusednorm.functional.layer_norm`.
        init_gain: what the gain ``weight_offset + weight`` starts at (0.1 calms early training).
        input_scale: a factor c on the input. ``Norm(c x; eps) = Norm(x; eps / c**2)`` (``eps / c`` with
            eps_outside), so it changes eps and costs nothing.

    Shape:
        input ``[*, *normalized_shape]``, output the same.
    """

    __module__ = "fusednorm"  # what pickles call it

    _options = LAYER_NORM

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init_gain: float = 1.0,
        input_scale: float = 1.0,
        **options: Any,
    ) -> None:
        self._set_options(options, init_gain, input_scale)
        shape: Any = normalized_shape  # torch's own annotation differs between versions
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def _scaled_eps(self) -> float:
        if self.input_scale == 1.0:
            return self.eps
        return self._divided(self.eps)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, *normalized_shape]``."""
        eps = self.eps if self.input_scale == 1.0 else self._scaled_eps()
        if not _is_compiling():
            parameters = self._parameters
            try:
                weight, bias = parameters["weight"], parameters["bias"]
            except KeyError:
                weight, bias = self.weight, self.bias
            output = _fast_layer_norm(
                input,
                self.normalized_shape,
                weight,
                bias,
                eps,
                *LAYER_NORM.values_of(self),
            )
            if output is not None:
                return output  # type: ignore[no-any-return]
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            eps,
            **LAYER_NORM.of(self),
        )

    def _norm_of_sum(self, input: Tensor, residual: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """The norm of ``alpha * residual + input``, and that sum."""
        return functional.add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self._scaled_eps(),
            alpha=alpha,
            **LAYER_NORM.of(self),
        )


@module_of(RMS_NORM)
class RMSNorm(_RowNorm, nn.RMSNorm):
    r"""``nn.RMSNorm`` on the fused kernels (Zhang and Sennrich 2019).

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot w + b

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``nn.RMSNorm``. ``eps=None`` is the
            machine epsilon of the accumulation type.
        bias: whether there is a learnable bias, which starts at 0.
        options: those of :func:`fusednorm.functional.rms_norm`.
        init_gain: what the gain ``weight_offset + weight`` starts at.
        input_scale: a factor c on the input, as an eps of ``eps / c**2``; see :class:`LayerNorm`.

    Shape:
        input ``[*, *normalized_shape]``, output the same.
    """

    __module__ = "fusednorm"  # what pickles call it

    _options = RMS_NORM

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        init_gain: float = 1.0,
        input_scale: float = 1.0,
        **options: Any,
    ) -> None:
        self._set_options(options, init_gain, input_scale)
        shape: Any = normalized_shape  # torch's own annotation differs between versions
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        made = nn.Parameter(torch.zeros(self.normalized_shape, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)

    def reset_parameters(self) -> None:
        """Sets the weight to ``init_gain - weight_offset``, and a bias to 0."""
        super().reset_parameters()
        bias = self._bias()
        if bias is not None:
            nn.init.zeros_(bias)

    def _bias(self) -> Tensor | None:
        """None also in a module that became ours by its class: ``nn.RMSNorm`` has no such attribute."""
        return getattr(self, "bias", None)

    def _scaled_eps(self, rows: Tensor) -> float | None:
        if self.input_scale == 1.0:
            return self.eps
        eps = _MACHINE_EPSILON.get(rows.dtype, 2.0**-23) if self.eps is None else self.eps
        return self._divided(eps)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, *normalized_shape]``."""
        eps = self.eps if self.input_scale == 1.0 else self._scaled_eps(input)
        if not _is_compiling():
            parameters = self._parameters
            bias: Tensor | None
            try:
                weight, bias = parameters["weight"], parameters["bias"]
            except KeyError:
                weight, bias = self.weight, self._bias()
            output = _fast_rms_norm(
                input, self.normalized_shape, weight, eps, bias, *RMS_NORM.values_of(self)
            )
            if output is not None:
                return output  # type: ignore[no-any-return]
        return functional.rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            eps,
            bias=self._bias(),
            **RMS_NORM.of(self),
        )

    def _norm_of_sum(self, input: Tensor, residual: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """The norm of ``alpha * residual + input``, and that sum."""
        return functional.add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self._scaled_eps(residual),
            alpha=alpha,
            bias=self._bias(),
            **RMS_NORM.of(self),
        )

    def extra_repr(self) -> str:
        """torch's, and the options that differ from their defaults."""
        return super().extra_repr() + ("" if self._bias() is None else ", bias=True")
