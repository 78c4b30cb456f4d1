"""What the norms over columns share: checks, and statistics of rows ``[rows, features]`` under a mask."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of ``dtype`` are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_input(name: str, input: Tensor, mask: Tensor | None, num_features: int) -> None:
    """Refuses what a norm over ``[B, C]`` or ``[B, T, C]`` with a mask ``[B]`` or ``[B, T]`` cannot take."""
    if input.dim() not in (2, 3):
        raise ValueError(
            f"fusednorm.{name}: input: expected 2 or 3 dimensions with the features last, "
            f"got shape {list(input.shape)}"
        )
    if input.shape[-1] != num_features:
        raise ValueError(
            f"fusednorm.{name}: input: expected {num_features} features in the last dimension, "
            f"got shape {list(input.shape)}"
        )
    if input.dtype not in _DTYPES:
        raise ValueError(
            f"fusednorm.{name}: input: expected float64, float32, bfloat16 or float16, got {input.dtype}"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"fusednorm.{name}: mask: expected torch.bool, True where real, got {mask.dtype}")
    if mask.shape != input.shape[:-1]:
        raise ValueError(
            f"fusednorm.{name}: mask: expected shape {list(input.shape[:-1])}, got {list(mask.shape)}"
        )
    if mask.device != input.device:
        raise ValueError(f"fusednorm.{name}: mask: expected device {input.device}, got {mask.device}")


def check_eps(name: str, eps: float) -> None:
    """Refuses NaN and infinity."""
    if not math.isfinite(eps):
        raise ValueError(f"fusednorm.{name}: eps: expected a finite number, got {eps}")


def check_count(name: str, count: Tensor, least: int, shape: torch.Size, has_mask: bool) -> None:
    """Refuses statistics of fewer than ``least`` rows. Eager calls wait for the device here."""
    no_row = f"fusednorm.{name}: mask: expected at least one True (a real position), got padding only"
    too_few = (
        f"fusednorm.{name}: Expected more than 1 value per channel when training, got input size "
        f"{list(shape)}" + (" with one real position in the mask" if has_mask else "")
    )
    if torch.compiler.is_compiling():
        torch._assert_async(count >= least, too_few if least > 1 else no_row)
    elif (number := int(count)) < least:
        raise ValueError(no_row if has_mask and number == 0 else too_few)


def row_count(x: Tensor, real: Tensor | None) -> Tensor:
    """The number of rows that ``real`` (``[rows, 1]``) marks, or of all; on x's device and in its dtype."""
    return x.new_full((), x.shape[0]) if real is None else real.sum().to(x.dtype)


def real_only(x: Tensor, real: Tensor | None) -> Tensor:
    """x with 0 in the rows that are padding, whatever stood there (0 times NaN would be NaN)."""
    return x if real is None else torch.where(real, x, 0)


def real_sum(x: Tensor, real: Tensor | None) -> Tensor:
    """The sum over the real rows; padding is finite (a product then takes an eighth of real_only's time)."""
    return x.sum(0) if real is None else (x * real.to(x.dtype)).sum(0)


def tame_padding(x_hat: Tensor, real: Tensor | None) -> Tensor:
    """x_hat with 0 for what is not finite in padding: its gradient of 0 times that would be NaN."""
    return x_hat if real is None else torch.where(real, x_hat, x_hat.nan_to_num(0.0, 0.0, 0.0))


class _AllReduce(torch.autograd.Function):
    """The sum over all processes, in all of them. Its own derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_output, ctx.group), None


_all_reduce: Any = _AllReduce.apply  # mypy: untyped in torch 2.11, typed in 2.15


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """The sum over all processes of ``group``; differentiable any number of times."""
    return _all_reduce(tensor, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """Every process's tensor, stacked in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor, group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_output, ctx.group)[torch.distributed.get_rank(ctx.group)], None


_gather: Any = _Gather.apply


class Moments(NamedTuple):
    """Statistics of rows; ``shift + mean`` is their mean, in two parts."""

    number: Tensor  # of real rows
    shift: Tensor
    mean: Tensor
    variance: Tensor  # biased
    centred: Tensor  # all rows minus their mean


def moments(x: Tensor, real: Tensor | None, group: Any) -> Moments:
    """Statistics of the real rows, of all processes of ``group``.

    The first mean, as rounded, is subtracted from the rows, and what is left is measured: far from 0 the
    rounding of one number would be an error of every row. Derivatives pass through the second part alone.
    """
    count = row_count(x, real)
    divisor = count.clamp_min(1)  # a process may hold nothing but padding
    data = real_only(x, real)
    shift = (data.sum(0) / divisor).detach()
    rest = data - shift
    if real is not None:
        rest.mul_(real.to(x.dtype))
    mean = rest.sum(0) / divisor
    squares = real_sum(rest.sub_(mean).square(), real)
    if group is not None:
        # Chan, Golub and LeVeque 1983: parts merge without ever taking a difference of large squares.
        parts = _gather(torch.stack([count.expand_as(mean), shift, mean, squares]), group)
        counts, shifts, means, parts_squares = parts.unbind(1)
        count = counts.sum(0)[0]
        divisor = count.clamp_min(1)
        shift = ((counts * shifts).sum(0) / divisor).detach()
        means = (shifts - shift) + means
        mean = (counts * means).sum(0) / divisor
        squares = (parts_squares + counts * (means - mean).square()).sum(0)
    centred = rest if real is None and group is None else (x - shift).sub_(mean)
    return Moments(count, shift, mean, squares / divisor, centred)
