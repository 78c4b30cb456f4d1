"""Sharding rules that let DTensor run the operators on their shards.

Rows are independent: any leading dimension may stay sharded, with weight and bias replicated; then
``grad_weight`` and ``grad_bias`` are partial sums. An input sharded inside a row is redistributed.

The rules are registered when a DTensor first reaches a function or module of ours. Who calls
``torch.ops.fusednorm`` with DTensors directly calls :func:`register` first. FSDP2 needs no rules. The
in-place operators have none: DTensor takes the updated argument for the result of such an operator.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fusednorm.torch_support.loading import _C

__all__ = ["register"]


# The arguments that are tensors, by what happens to them, as C++ declares them; the rest are numbers, shapes.
_ROWS = {name for name, shape in _C.tensor_arguments.items() if shape != "parameter"}
_PARAMETERS = set(_C.tensor_arguments) - _ROWS


def _rule_of(op: Any) -> Any:
    """The acceptable placements of an operator: everything replicated, or rows sharded in one dimension."""
    names = [argument.name for argument in op._schema.arguments]
    row_gradients = 2 if "residual_out" in names else 1

    def rule(*args: Any, **_: Any) -> list[tuple[list[Any], list[Any]]]:
        given = dict(zip(names, args, strict=False))
        rows_of: Any = given.get("residual_out", given.get("input"))
        mask = given.get("output_mask")

        def case(rows: Any, sums: Any) -> tuple[list[Any], list[Any]]:
            if mask is None:
                outputs = [rows] * len(op._schema.returns)
            else:  # one that the mask leaves out has no placement (torch 2.11 insists)
                gradients = [rows] * row_gradients + [sums] * (len(mask) - row_gradients)
                outputs = [g if wanted else None for g, wanted in zip(gradients, mask, strict=True)]
            kinds = {**dict.fromkeys(_ROWS, rows), **dict.fromkeys(_PARAMETERS, Replicate())}
            return outputs, [None if value is None else kinds.get(name) for name, value in given.items()]

        # A row of the group norms is part of a sample, in the first dimension.
        dims = len(rows_of.shape) - len(given["normalized_shape"]) if "normalized_shape" in given else 1
        leading = range(dims)
        return [case(Replicate(), Replicate())] + [case(Shard(d), Partial()) for d in leading]

    return rule


@functools.cache
def register() -> None:
    """Registers the rules with ``torch.distributed.tensor``; once, whatever the number of calls."""
    for norm in ("layer_norm", "rms_norm", "_scale_rows", "group_norm", "add_layer_norm", "add_rms_norm"):
        for suffix in ("", "_forward", "_backward"):
            op = getattr(torch.ops.fusednorm, norm + suffix).default
            register_sharding(op)(_rule_of(op))
