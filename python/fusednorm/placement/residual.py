"""``Residual``: a sublayer, its norm and the residual stream around them."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm.placement.constants import deepnorm_constants
from fusednorm.placement.fusion import add_branch, add_norm

__all__ = ["Residual"]

_PLACEMENTS = ("pre", "post", "deep", "sandwich")


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

    __module__ = "fusednorm"  # what pickles call it

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
