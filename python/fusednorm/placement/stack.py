"""``ResidualStack``: residual blocks one after another, fused from each to the next."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fusednorm.placement.fusion import add_branch, add_norm, is_called_as
from fusednorm.placement.residual import Residual

__all__ = ["ResidualStack"]


class ResidualStack(nn.Module):
    """:class:`Residual` blocks one after another, the add of each fused with the norm of the next.

    Gives the numbers of ``nn.Sequential(*residuals, final_norm)``, whose parameter names it has too, so that
    a state dict passes both ways. Between "pre" and "sandwich" blocks, and before ``final_norm``, one
    operator takes the branch and the stream to the next block's input and the new stream; "post" and "deep"
    blocks fuse within themselves. Blocks of several placements may be mixed.

    Fusion passes over calls of the inner norms and of the blocks. Where one has hooks (a monitor, a warm-up,
    FSDP) or has been wrapped (checkpointing), it is called, at the price of fusion there.

    For an fp32 stream under bf16 sublayers, give it an fp32 input and each block ``sublayer_dtype``.

    Args:
        residuals: the blocks.
        final_norm: a norm of the last sum, as pre-norm models have it.

    Shape:
        x ``[*, *normalized_shape]``, output the same, and of the same dtype. Further arguments go to every
        sublayer.

    Raises:
        ValueError, TypeError: at construction, no blocks, or one that is no :class:`Residual`.
    """

    __module__ = "fusednorm"  # what pickles call it

    def __init__(self, residuals: Iterable[Residual], final_norm: nn.Module | None = None) -> None:
        super().__init__()
        blocks = list(residuals)
        if not blocks:
            raise ValueError("fusednorm.ResidualStack: residuals: expected one or more, got none")
        for index, block in enumerate(blocks):
            if not isinstance(block, Residual):
                raise TypeError(
                    f"fusednorm.ResidualStack: residuals[{index}]: expected a fusednorm.Residual, "
                    f"got {type(block).__name__}"
                )
            self.add_module(str(index), block)
        if final_norm is not None:
            if not isinstance(final_norm, nn.Module):
                raise TypeError(
                    "fusednorm.ResidualStack: final_norm: expected a torch.nn.Module, "
                    f"got {type(final_norm).__name__}"
                )
            self.add_module(str(len(blocks)), final_norm)
        self._length = len(blocks)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(str(range(self._length)[index]))

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(self._length))

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm after the last block, or None."""
        return self._modules.get(str(self._length))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``x`` of shape ``[*, *normalized_shape]`` through all blocks, whose sublayers get the rest."""
        stream, branch = x, None
        for block in self:
            if isinstance(block, Residual) and is_called_as(block, Residual):
                stream, branch = block.advance(stream, branch, *args, **kwargs)
            else:
                stream, branch = block(add_branch(branch, stream), *args, **kwargs), None
        if self.final_norm is None:
            return add_branch(branch, stream)
        return add_norm(self.final_norm, branch, stream, 1.0, stream.dtype)[0]
