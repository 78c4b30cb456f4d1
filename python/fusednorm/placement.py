"""Where a norm stands around a sublayer and its residual: before, after, both, or after a scaled residual."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusednorm import functional
from fusednorm.modules import LayerNorm, RMSNorm

__all__ = ["DeepNormConstants", "Residual", "deepnorm_constants"]

_PLACEMENTS = ("pre", "post", "deep", "sandwich")
_has_any_global_hook: Callable[[], bool] = nn.modules.module._has_any_global_hook


class DeepNormConstants(NamedTuple):
    """``alpha`` scales the residual stream, ``beta`` is the gain of the initialisation."""

    alpha: float
    beta: float


def deepnorm_constants(
    layers: int | None = None,
    *,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    part: str | None = None,
) -> DeepNormConstants:
    """DeepNorm's constants by depth (Wang et al. 2022, table 1).

    A layer is a Transformer layer: its attention and its feed-forward, two :class:`Residual`, count as one.

    Args:
        layers: the depth L of an encoder-only or decoder-only model: alpha ``(2 L)**(1/4)``,
            beta ``(8 L)**(-1/4)``.
        encoder_layers, decoder_layers: the depths N and M of a model with both, and
        part: which of the two. "encoder": alpha ``0.81 (N**4 M)**(1/16)``, beta
            ``0.87 (N**4 M)**(-1/16)``; "decoder": alpha ``(3 M)**(1/4)``, beta ``(12 M)**(-1/4)``.

    Raises:
        ValueError: neither ``layers`` nor both of the others, or all; a depth below 1; another part.
    """
    both = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    given = {name: depth for name, depth in {"layers": layers, **both}.items() if depth is not None}
    if list(given) not in (["layers"], list(both)):
        raise ValueError(
            "fusednorm: DeepNorm: expected layers, or encoder_layers and decoder_layers, "
            f"got {', '.join(given) or 'neither'}"
        )
    for name, depth in given.items():
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"fusednorm: DeepNorm: {name}: expected an integer of 1 or more, got {depth!r}")
    parts = ("encoder", "decoder") if layers is None else (None,)
    if part not in parts:
        expected = '"encoder" or "decoder"' if layers is None else "none beside layers"
        raise ValueError(f"fusednorm: DeepNorm: part: expected {expected}, got {part!r}")
    if layers is not None:
        return DeepNormConstants((2 * layers) ** 0.25, (8 * layers) ** -0.25)
    encoder, decoder = given["encoder_layers"], given["decoder_layers"]
    if part == "decoder":
        return DeepNormConstants((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)
    depth = (encoder**4 * decoder) ** 0.0625
    return DeepNormConstants(0.81 * depth, 0.87 / depth)


def is_called_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of ``module`` runs ``kind.forward`` and nothing else.

    Fusion passes the call over; if another forward, a hook or ``module.compile()`` hangs on it, it may not.
    """
    return getattr(module.forward, "__func__", None) is kind.forward and not (
        module._compiled_call_impl
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def add_branch(branch: Tensor | None, stream: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha * stream + branch``, in the stream's dtype."""
    return stream if branch is None else torch.add(branch, stream, alpha=alpha).to(stream.dtype)


_ROUNDED_ONCE = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
}


def _rounds_as_two_steps(norm: nn.Module, stream: torch.dtype, output: torch.dtype) -> bool:
    """Whether the operator, which rounds once to ``output``, gives what ``norm(s).to(output)`` does.

    It does for one dtype, and for an output that torch rounds once from the stream's accumulation type (fp64
    it takes to 16 bits by way of fp32); but the llama mode rounds x_hat too, there to the output's dtype and
    here to the stream's.
    """
    if output == stream:
        return True
    once = (stream, output) in _ROUNDED_ONCE
    return once and getattr(norm, "casting_mode", "default") == "default"


def add_norm(
    norm: nn.Module, branch: Tensor | None, stream: Tensor, alpha: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(norm(s) in dtype, s)`` with ``s = alpha * stream + branch``: one operator for our norms, else two.

    The operator's output has the branch's dtype, so where another is wanted it takes two as well.
    """
    if branch is not None and branch.dtype == dtype and _rounds_as_two_steps(norm, stream.dtype, dtype):
        if isinstance(norm, LayerNorm) and is_called_as(norm, LayerNorm):
            return functional.add_layer_norm(
                branch,
                stream,
                norm.normalized_shape,
                norm.weight,
                norm.bias,
                norm._scaled_eps(),
                alpha=alpha,
                weight_offset=norm.weight_offset,
                eps_outside=norm.eps_outside,
                unbiased=norm.unbiased,
            )
        if isinstance(norm, RMSNorm) and is_called_as(norm, RMSNorm):
            return functional.add_rms_norm(
                branch,
                stream,
                norm.normalized_shape,
                norm.weight,
                norm._scaled_eps(stream),
                alpha=alpha,
                weight_offset=norm.weight_offset,
                casting_mode=norm.casting_mode,
            )
    stream = add_branch(branch, stream, alpha)
    return norm(stream).to(dtype), stream


class Residual(nn.Module):
    """A sublayer F, a norm and the residual stream around them.

    ========  ================================  ==========================================
    pre       ``x + F(norm(x))``                GPT-2, Llama
    post      ``norm(x + F(x))``                Vaswani et al. 2017, BERT
    deep      ``norm(alpha * x + F(x))``        DeepNorm, Wang et al. 2022
    sandwich  ``x + norm2(F(norm(x)))``         CogView (Ding et al. 2021), Gemma 2
    ========  ================================  ==========================================

    With a :class:`LayerNorm` or :class:`RMSNorm` of ours, "post" and "deep" are one operator for the sum and
    the norm. A norm with hooks, or of another class, is called as it is, on the sum.

    Args:
        sublayer: F, a module that returns a tensor of its input's shape.
        norm: the norm. For "sandwich" a pair, or one that is deep-copied for ``norm2``: same values,
            parameters of its own.
        placement: "pre", "post", "deep" or "sandwich".
        alpha: for "deep" only, and required there unless ``layers`` is given: a positive number.
        layers: for "deep", the depth of an encoder-only or decoder-only model in Transformer layers, of
            which alpha follows; for the other kind take alpha from :func:`deepnorm_constants`.
        sublayer_dtype: what the sublayer's input is cast to: bf16 sublayers, or those under autocast, on an
            fp32 stream. None: x's dtype.

    Shape:
        x ``[*, *normalized_shape]``, output the same, and of the same dtype whatever the sublayer's is.
        Further arguments go to the sublayer.

    Raises:
        ValueError, TypeError: at construction, a placement, alpha or norm that does not fit.
        RuntimeError: a sublayer that returns something else than a tensor of its input's shape.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        norm: nn.Module | tuple[nn.Module, nn.Module],
        placement: str = "pre",
        alpha: float | None = None,
        *,
        layers: int | None = None,
        sublayer_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if placement not in _PLACEMENTS:
            raise ValueError(
                f"fusednorm.Residual: placement: expected one of {', '.join(_PLACEMENTS)}, got {placement!r}"
            )
        norms = list(norm) if isinstance(norm, (tuple, list)) else [norm]
        if len(norms) not in ((1, 2) if placement == "sandwich" else (1,)):
            expected = "a norm or a pair" if placement == "sandwich" else "one norm"
            raise ValueError(
                f'fusednorm.Residual: norm: expected {expected} for placement "{placement}", got {len(norms)}'
            )
        for name, module in [("sublayer", sublayer), *(("norm", module) for module in norms)]:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"fusednorm.Residual: {name}: expected a torch.nn.Module, got {type(module).__name__}"
                )
        self.placement = placement
        self.alpha = self._alpha(placement, alpha, layers)
        self.sublayer_dtype = sublayer_dtype
        self.sublayer = sublayer
        self.norm = norms[0]
        if placement == "sandwich":
            self.norm2 = norms[1] if len(norms) == 2 else copy.deepcopy(norms[0])

    @staticmethod
    def _alpha(placement: str, alpha: float | None, layers: int | None) -> float:
        if placement != "deep":
            if alpha is not None or layers is not None:
                raise ValueError(
                    'fusednorm.Residual: alpha, layers: expected with placement "deep" only, '
                    f'got placement "{placement}"'
                )
            return 1.0
        if (alpha is None) == (layers is None):
            raise ValueError(
                'fusednorm.Residual: placement "deep": expected alpha or layers (of which alpha follows), '
                f"got {'neither' if alpha is None else 'both'}"
            )
        if alpha is None:
            return deepnorm_constants(layers).alpha
        if not 0 < alpha < math.inf:
            raise ValueError(f"fusednorm.Residual: alpha: expected a positive number, got {alpha}")
        return float(alpha)

    def _branch(self, input: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        output = self.sublayer(input, *args, **kwargs)
        if not isinstance(output, Tensor) or output.shape != input.shape:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise RuntimeError(
                f"fusednorm.Residual: sublayer: expected a tensor of shape {list(input.shape)} from "
                f"{type(self.sublayer).__name__}, got {got}"
            )
        return output

    def advance(
        self, stream: Tensor, branch: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """From ``(stream, branch)``, where ``stream + branch`` is the input, to the same of the output.

        The sum is left to whoever normalizes it next; a branch of None is 0.
        """
        dtype = self.sublayer_dtype or stream.dtype
        if self.placement in ("pre", "sandwich"):
            h, stream = add_norm(self.norm, branch, stream, 1.0, dtype)
            branch = self._branch(h, args, kwargs)
            return stream, self.norm2(branch) if self.placement == "sandwich" else branch
        stream = add_branch(branch, stream)
        branch = self._branch(stream.to(dtype), args, kwargs)
        return add_norm(self.norm, branch, stream, self.alpha, stream.dtype)[0], None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``x`` of shape ``[*, *normalized_shape]`` through the sublayer, which is given the rest too."""
        stream, branch = self.advance(x, None, *args, **kwargs)
        return add_branch(branch, stream)

    def extra_repr(self) -> str:
        """The placement, alpha where it has one, and the sublayer's dtype where it was named."""
        shown = [f"placement={self.placement!r}"]
        shown += [f"alpha={self.alpha:.6g}"] if self.placement == "deep" else []
        shown += [f"sublayer_dtype={self.sublayer_dtype}"] if self.sublayer_dtype else []
        return ", ".join(shown)
