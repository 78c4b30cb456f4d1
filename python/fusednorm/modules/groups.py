"""GroupNorm and InstanceNorm as modules: ``torch.nn``'s classes with another ``forward``."""

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from fusednorm import functional

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(nn.GroupNorm):
    r"""``nn.GroupNorm`` on the fused kernels (Wu and He 2018).

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w_c + b_c

    Mean and variance (biased) are those of one sample's group: ``num_channels / num_groups`` channels at all
    positions. Arguments are those of ``nn.GroupNorm``, and an existing module becomes one of these by its
    class alone.

    Shape:
        input ``[N, num_channels, *]``, output the same, in the input's memory format.
    """

    __module__ = "fusednorm"  # what pickles call it

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[N, num_channels, *]``."""
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class InstanceNorm(_InstanceNorm):
    r"""``nn.InstanceNorm1d``, ``2d`` and ``3d`` in one class (Ulyanov, Vedaldi and Lempitsky 2016).

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w_c + b_c

    Mean and variance (biased) are those of one sample's channel. State dicts of torch's three load.

    Args:
        num_features: C; an input with another number of channels is refused, with ``affine`` or without.
        eps: added to the variance.
        momentum: not read, for it belongs to the running statistics.
        affine: whether there are a weight and a bias of shape ``[C]``.
        track_running_stats: False; True is refused.
        device, dtype: of weight and bias.
        spatial_dims: 1, 2 or 3: how many dimensions come after the channels. It tells ``[C, H, W]`` from
            ``[N, C, L]``, as torch's class names do. None takes all inputs but ``[C, L]`` for batches.

    Shape:
        input ``[N, C, L]``, ``[N, C, H, W]`` or ``[N, C, D, H, W]``; without the batch, ``[C, L]``, and with
        ``spatial_dims`` ``[C, H, W]`` or ``[C, D, H, W]`` too. Output the same, in the input's memory format.

    Raises:
        ValueError: ``track_running_stats=True``, a wrong number of dimensions or channels, a single position.
    """

    __module__ = "fusednorm"  # what pickles call it

    spatial_dims: int | None = None  # of a module that became ours by its class

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        spatial_dims: int | None = None,
    ) -> None:
        if track_running_stats:
            raise ValueError(
                "fusednorm.InstanceNorm: track_running_stats: expected False, got True: there are no running "
                "statistics here; torch.nn.InstanceNorm1d, 2d and 3d have them"
            )
        if spatial_dims not in (None, 1, 2, 3):
            raise ValueError(
                f"fusednorm.InstanceNorm: spatial_dims: expected 1, 2, 3 or None, got {spatial_dims!r}"
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.spatial_dims = spatial_dims

    def _check_input(self, input: Tensor) -> bool:
        """Whether the input has no batch dimension."""
        dims, spatial = input.dim(), self.spatial_dims
        if dims not in ((2, 3, 4, 5) if spatial is None else (spatial + 1, spatial + 2)):
            expected = "[N, C, *] or [C, L], with 1 to 3 dimensions"
            if spatial is not None:
                expected = f"[N, C, *] or [C, *], with {spatial} (spatial_dims)"
            raise ValueError(
                f"fusednorm.InstanceNorm: input: expected shape {expected} after the channels, "
                f"got {list(input.shape)}"
            )
        alone = dims == (2 if spatial is None else spatial + 1)
        channels = input.shape[0 if alone else 1]
        if channels != self.num_features:
            hint = ""
            if spatial is None and not alone and input.shape[0] == self.num_features:
                hint = f"; without a batch it needs spatial_dims={dims - 1}"
            raise ValueError(
                f"fusednorm.InstanceNorm: input: expected {self.num_features} channels (num_features), got "
                f"{channels} in dimension {0 if alone else 1} of shape {list(input.shape)}{hint}"
            )
        return alone

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[N, C, *]``, or ``[C, *]`` as said above."""
        alone = self._check_input(input)
        output = functional.instance_norm(
            input.unsqueeze(0) if alone else input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        return output.squeeze(0) if alone else output

    def extra_repr(self) -> str:
        """torch's, and spatial_dims where it is given."""
        base: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return base if self.spatial_dims is None else f"{base}, spatial_dims={self.spatial_dims}"
