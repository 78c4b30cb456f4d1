"""The norms over groups of channels as functions: inputs are ``[N, C, *]``, rows are a sample's groups.

Part of :mod:`fusednorm.functional`, which see for what holds of every function. One thing differs: the output
keeps the input's memory format (channels last stays channels last), as ``F.group_norm``'s does.
"""

import math

import torch
from torch import Tensor

from fusednorm.torch_support.loading import _C
from fusednorm.torch_support.subclasses import prepare_for_subclass, refuse_nested

__all__ = ["group_norm", "instance_norm"]


_is_compiling = torch.compiler.is_compiling
_fast_group_norm = _C.group_norm


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    r"""GroupNorm (Wu and He 2018), as ``F.group_norm``.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot w_c + b_c

    Mean and variance (biased) are those of one sample's group: ``C / num_groups`` channels next to each
    other, at all positions. A group of one element has the output ``b_c``.

    Args:
        input: ``[N, C, *]``, with any number of further dimensions, or none.
        num_groups: G, a divisor of C.
        weight: of shape ``[C]``, or None for 1.
        bias: of shape ``[C]``, or None for 0.
        eps: added to the variance; any finite number.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
    """
    if not _is_compiling():
        output = _fast_group_norm(input, num_groups, weight, bias, eps)
        if output is not None:
            return output  # type: ignore[no-any-return]
        prepare_for_subclass("group_norm", input)
    return torch.ops.fusednorm.group_norm.default(  # type: ignore[no-any-return]
        input, num_groups, weight, bias, eps
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""InstanceNorm (Ulyanov, Vedaldi and Lempitsky 2016), as ``F.instance_norm`` without running statistics.

    It is :func:`group_norm` with a group for each channel.

    Args:
        input: ``[N, C, *]``, with 2 positions or more.
        running_mean, running_var: None; anything else is refused.
        weight: of shape ``[C]``, or None for 1.
        bias: of shape ``[C]``, or None for 0.
        use_input_stats: True; anything else is refused.
        momentum: not read, for it belongs to the running statistics.
        eps: added to the variance; any finite number.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        RuntimeError: an argument of the wrong shape, dtype, device or layout.
        ValueError: running statistics; a single position, whose variance is 0 (torch refuses it too).
    """
    for name, statistic in (("running_mean", running_mean), ("running_var", running_var)):
        if statistic is not None:
            raise ValueError(
                f"fusednorm::instance_norm: {name}: expected None, got {type(statistic).__name__}: "
                "there are no running statistics here; torch.nn.functional.instance_norm has them"
            )
    if not use_input_stats:
        raise ValueError(
            f"fusednorm::instance_norm: use_input_stats: expected True, got {use_input_stats}: "
            "there are no running statistics here; torch.nn.functional.instance_norm has them"
        )
    refuse_nested("instance_norm", input)
    if input.dim() < 2:
        raise RuntimeError(
            f"fusednorm::instance_norm: input: expected shape [N, C, *], got {list(input.shape)}"
        )
    if math.prod(input.shape[2:]) == 1:
        raise ValueError(
            "fusednorm::instance_norm: input: Expected more than 1 spatial element when training, "
            f"got input size {list(input.shape)}"
        )
    output = group_norm(input, input.shape[1], weight, bias, eps)
    # Under CUDA's autocast torch has group_norm give fp32, and instance_norm keep its dtype.
    return output if output.dtype == input.dtype else output.to(input.dtype)
