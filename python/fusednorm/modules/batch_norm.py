"""BatchNorm over the columns of ``[*, features]``: statistics per feature, over batch and positions.

Nothing here is a kernel: torch's operators, with the backward written out, so that autograd keeps the input
and a few numbers per feature. torch's own kernel serves evaluation only: in training on the CPU it sums rows
one after the other in fp32 (100000 rows of mean 1e4: the mean is off by 7, the variance by a factor of 50).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusednorm.modules.columns import (
    accumulation_type,
    all_reduce,
    check_count,
    check_eps,
    check_input,
    moments,
    real_sum,
    tame_padding,
)
from fusednorm.modules.rows import _extra_repr
from fusednorm.torch_support.recomputation import recomputing

__all__ = ["BatchNorm"]


class _BatchNormFunction(torch.autograd.Function):
    """Rows ``[rows, features]`` by their own statistics; also returns those: count, mean, biased variance."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        real: Tensor | None,
        eps: float,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = input.to(accumulation_type(input.dtype))
        count, shift, mean, variance, centred = moments(x, real, group)
        rstd = (variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight.to(x.dtype)
        y = centred * scale if bias is None else torch.addcmul(bias.to(x.dtype), centred, scale)
        if y.dtype != input.dtype:  # compiled by torch 2.11, a conversion to its own dtype cuts the gradient
            y = y.to(input.dtype)
        ctx.save_for_backward(input, weight, bias, real, count, shift, mean, rstd)
        ctx.eps, ctx.group = eps, group
        statistics = (count, shift + mean, variance)
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, real, count, shift, mean, rstd = ctx.saved_tensors
        x, g = input.to(rstd.dtype), grad_output.contiguous().to(rstd.dtype)
        if torch.is_grad_enabled():  # the backward is to be differentiated: statistics are functions of x
            again = moments(x, real, ctx.group)
            rstd = (again.variance + ctx.eps).rsqrt()
            x_hat = again.centred * rstd
        else:
            x_hat = (x - shift).sub_(mean).mul_(rstd)
        x_hat = tame_padding(x_hat, real)
        g_x_hat = g * x_hat
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = g_x_hat.sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0).to(bias.dtype)
        if ctx.needs_input_grad[0]:
            sums = torch.stack([real_sum(g, real), real_sum(g_x_hat, real)])
            del g_x_hat  # the next takes its memory
            if ctx.group is not None:
                sums = all_reduce(sums, ctx.group)
            means = sums / -count
            through_statistics = torch.addcmul(means[0], x_hat, means[1])
            if real is not None:
                through_statistics.mul_(real.to(x.dtype))
            scale = rstd if weight is None else rstd * weight
            grad_input = through_statistics.add_(g).mul_(scale).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


_batch_norm: Any = _BatchNormFunction.apply  # mypy: untyped in torch 2.11, typed in 2.15


class BatchNorm(nn.BatchNorm1d):
    r"""``nn.BatchNorm1d`` with the features last, a padding mask, and synchronised statistics.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w + b

    over all positions, for each feature (Ioffe and Szegedy 2015). State, running averages (unbiased variance,
    ``momentum=None`` for the average of all batches) and evaluation are those of ``nn.BatchNorm1d``.
    Statistics are in fp32 (fp64 for fp64) and centred, whatever the dtype and however large the mean.

    With a mask, statistics and running averages are those of the real positions alone. Padded positions are
    normalized by them too, as constants: their gradient reaches their own input, weight and bias, as in
    evaluation, and no other position. A loss that leaves padding out has none there; what stands in padding,
    NaN included, then reaches nothing.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in ``nn.BatchNorm1d``.
        sync: in training, statistics over all processes of ``process_group``, as ``nn.SyncBatchNorm``: one
            gather in forward, one sum in backward. Without ``torch.distributed`` they are the process's own.
            (``nn.SyncBatchNorm.convert_sync_batchnorm`` would put the features into dimension 1.)
        process_group: the processes; None: all.

    Shape:
        input ``[B, C]`` or ``[B, T, C]``; mask ``[B]`` or ``[B, T]``, bool, True where real; output as input.
        torch's form has the features of three dimensions in dimension 1.

    Raises:
        ValueError: input or mask of the wrong shape, dtype or device; in training, fewer than two values per
            channel or a mask of padding only. To see that, a call with a mask or sync waits for a GPU.

    Zero rows pass and leave the running averages alone. Under ``torch.utils.checkpoint`` a recomputation does
    not count twice (but a compiled module inside a checkpoint does, as torch's own).
    """

    __module__ = "fusednorm"  # what pickles call it

    # The defaults of a module that became ours by its class.
    sync: bool = False
    process_group: Any = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        sync: bool = False,
        process_group: Any = None,
    ) -> None:
        check_eps("BatchNorm", eps)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.sync = sync
        self.process_group = process_group

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes ``input`` of shape ``[B, C]`` or ``[B, T, C]``; ``mask`` is True where it is real."""
        check_input("BatchNorm", input, mask, self.num_features)
        rows = input.flatten(0, -2).contiguous()
        if not self.training and self.running_mean is not None:
            wide = accumulation_type(input.dtype)  # torch's kernel wants these in one type
            tensors = (self.running_mean, self.running_var, self.weight, self.bias)
            mean, var, weight, bias = (None if tensor is None else tensor.to(wide) for tensor in tensors)
            return F.batch_norm(rows, mean, var, weight, bias, False, 0.0, self.eps).view(input.shape)
        real = None if mask is None else mask.reshape(-1, 1)
        group = self._group()
        output, count, batch_mean, batch_var = _batch_norm(
            rows, self.weight, self.bias, real, self.eps, group
        )
        if group is not None or rows.shape[0] > 0:
            if real is not None or group is not None or rows.shape[0] == 1:
                check_count("BatchNorm", count, 2, input.shape, mask is not None)
            if self.training and self.track_running_stats and not recomputing():
                self._track(count, batch_mean, batch_var)
        return output.view(input.shape)  # type: ignore[no-any-return]

    def _group(self) -> Any:
        """The processes to share statistics with, or None."""
        distributed = torch.distributed
        if not (self.sync and self.training and distributed.is_available() and distributed.is_initialized()):
            return None
        group = distributed.group.WORLD if self.process_group is None else self.process_group
        return group if distributed.get_world_size(group) > 1 else None

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Moves the running averages towards a batch's statistics."""
        assert self.num_batches_tracked is not None  # with the other two: track_running_stats
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum
        if factor is None:
            factor = self.num_batches_tracked.to(mean.dtype).reciprocal()
        unbiased = variance * (count / (count - 1))
        for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
            assert running is not None
            running.copy_(torch.lerp(running.to(batch.dtype), batch, factor))

    def extra_repr(self) -> str:
        """torch's, and ``sync`` where it is on."""
        return _extra_repr(super().extra_repr(), sync=(self.sync, False))  # type: ignore[no-untyped-call]
