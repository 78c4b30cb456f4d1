"""ScaleNorm as a module: rows scaled to one learned length."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm import functional

__all__ = ["ScaleNorm"]


class ScaleNorm(nn.Module):
    r"""ScaleNorm (Nguyen and Salazar 2019, "Transformers without Tears") on the fused kernels.

    .. math:: y = g \cdot \frac{x}{\max(\lVert x \rVert_2, \epsilon)}

    Args:
        dim: the size of the last dimension.
        eps: the least that a row is divided by, above 0; where it takes effect the gradient is that of
            ``g * x / eps``.
        device, dtype: of ``g``; any dtype may stand beside any input's.

    Attributes:
        g: the parameter, of shape ``[1]`` (FSDP2 refuses 0-dimensional ones), initialised to ``sqrt(dim)``.
            A 0-dimensional ``g`` of another implementation's checkpoint loads too.

    Shape:
        input ``[*, dim]``, output the same.

    Raises:
        ValueError: dim or eps not above 0.
        RuntimeError: an input of the wrong shape, dtype, device or layout.
    """

    __module__ = "fusednorm"  # what pickles call it

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim <= 0:
            raise ValueError(f"fusednorm.ScaleNorm: dim: expected a positive number, got {dim}")
        if not 0 < eps < math.inf:
            raise ValueError(f"fusednorm.ScaleNorm: eps: expected a finite number above 0, got {eps}")
        self.dim = dim
        self.eps = eps
        self.g = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets ``g`` to ``sqrt(dim)``: the rows' root mean square starts at 1."""
        nn.init.constant_(self.g, math.sqrt(self.dim))

    def forward(self, input: Tensor) -> Tensor:
        """Scales the rows of ``input`` of shape ``[*, dim]``."""
        if input.dim() == 0 or input.shape[-1] != self.dim:
            raise RuntimeError(
                f"fusednorm.ScaleNorm: input: expected shape [*, {self.dim}], got {list(input.shape)}"
            )
        return functional.scale_norm(input, self.g, self.eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        g = state_dict.get(prefix + "g")
        if isinstance(g, Tensor) and g.dim() == 0:
            state_dict[prefix + "g"] = g.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The size and eps."""
        return f"{self.dim}, eps={self.eps}"
