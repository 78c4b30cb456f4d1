"""torch's opcheck, with its costly part where it can find something."""

from typing import Any

import pytest
from torch.testing._internal import optests

UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")

# The fourth of torch's checks traces an operator, and its backward where inputs require grad, by AOTAutograd
# with dynamic shapes: 0.1 to 2 s of CPU time, where the other three take 20 ms. Whether an operator can be
# traced does not depend on the dtype, nor on every one of the masks: make test traces fp32 with some masks,
# make test-all each case.
traces = pytest.mark.parametrize(
    "trace_all",
    [False, pytest.param(True, marks=pytest.mark.slow(reason="traces each dtype and mask: minutes"))],
    ids=["some traced", "all traced"],
)


def opcheck(op: Any, arguments: tuple, options: dict[str, Any] | None = None, *, traced: bool = True) -> None:
    """Three of torch's checks, and with ``traced`` the fourth."""
    how = {} if traced else {"test_utils": UNTRACED}
    optests.opcheck(op, arguments, options, **how)
