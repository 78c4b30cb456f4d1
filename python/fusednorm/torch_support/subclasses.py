"""What tensor subclasses need before ``torch.ops`` may have them."""

import sys

from torch import Tensor


def refuse_nested(op: str, input: Tensor) -> None:
    """Jagged tensors' own message names no argument."""
    if isinstance(input, Tensor) and input.is_nested:
        raise RuntimeError(f"fusednorm::{op}: input: expected a dense (strided) tensor, got a nested tensor")


def prepare_for_subclass(op: str, input: Tensor) -> None:
    """DTensor learns our operators when it first arrives; jagged tensors, which could not, are refused."""
    refuse_nested(op, input)
    if "torch.distributed.tensor" in sys.modules:
        from fusednorm.torch_support import dtensor

        dtensor.register()
