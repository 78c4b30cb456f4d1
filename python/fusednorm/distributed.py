"""Sharding rules that let DTensor run the operators on their shards.

Rows are independent: any leading dimension may stay sharded, with weight and bias replicated; then
``grad_weight`` and ``grad_bias`` are partial sums. An input sharded inside a row is redistributed.

The rules are registered when a DTensor first reaches a function or module of ours. Who calls
``torch.ops.fusednorm`` with DTensors directly calls :func:`register` first. FSDP2 needs no rules.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register"]


def _leading_dims(input: Any, normalized_shape: Any) -> range:
    return range(len(input.shape) - len(normalized_shape))


def _present(tensor: Any, placement: Any) -> Any:
    return None if tensor is None else placement


@functools.cache
def register() -> None:
    """Registers the rules with ``torch.distributed.tensor``; once, whatever the number of calls."""
    ops = torch.ops.fusednorm

    def forward_rule(outputs: int, has_bias: bool) -> Any:
        def rule(input: Any, normalized_shape: Any, weight: Any = None, *rest: Any, **_: Any) -> Any:
            bias = rest[0] if has_bias and rest else None
            scalars = [None] * (len(rest) - (1 if has_bias and rest else 0))

            def case(rows: Any) -> Any:
                inputs = [rows, None, _present(weight, Replicate())]
                if has_bias:
                    inputs.append(_present(bias, Replicate()))
                return [rows] * outputs, inputs + scalars

            return [case(Replicate())] + [case(Shard(d)) for d in _leading_dims(input, normalized_shape)]

        return rule

    register_sharding(ops.layer_norm.default)(forward_rule(1, True))
    register_sharding(ops.rms_norm.default)(forward_rule(1, False))
    register_sharding(ops.layer_norm_forward.default)(forward_rule(3, True))
    register_sharding(ops.rms_norm_forward.default)(forward_rule(2, False))

    def backward_rule(
        input: Any, normalized_shape: Any, mask: Any, tail: list[Any]
    ) -> list[tuple[list[Any], list[Any]]]:
        def case(rows: Any, sums: Any) -> tuple[list[Any], list[Any]]:
            # An output that the mask leaves out has no placement (torch 2.11 insists).
            outputs = [rows if mask[0] else None] + [sums if wanted else None for wanted in mask[1:]]
            return outputs, [rows, rows, None] + [rows if t == "rows" else t for t in tail]

        return [case(Replicate(), Replicate())] + [
            case(Shard(d), Partial()) for d in _leading_dims(input, normalized_shape)
        ]

    @register_sharding(ops.layer_norm_backward.default)  # type: ignore[untyped-decorator]
    def _layer_norm_backward(
        grad_output: Any,
        input: Any,
        normalized_shape: Any,
        mean: Any,
        rstd: Any,
        weight: Any,
        bias: Any,
        eps: Any,
        output_mask: Any,
        **_: Any,
    ) -> Any:
        parameters = [_present(weight, Replicate()), _present(bias, Replicate())]
        return backward_rule(input, normalized_shape, output_mask, ["rows", "rows", *parameters, None, None])

    @register_sharding(ops.rms_norm_backward.default)  # type: ignore[untyped-decorator]
    def _rms_norm_backward(
        grad_output: Any,
        input: Any,
        normalized_shape: Any,
        rstd: Any,
        weight: Any,
        eps: Any,
        output_mask: Any,
        **_: Any,
    ) -> Any:
        return backward_rule(
            input, normalized_shape, output_mask, ["rows", _present(weight, Replicate()), None, None]
        )
