"""torch's opcheck, with its costly part where it can find something."""

from typing import Any

import pytest
from torch.testing._internal import optests

from conftest import NORMS

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


# Inductor calls our operators as they are and compiles C++ for what stands around them: 26 s of CPU time a
# test, the same for either norm. make test has it for LayerNorm, make test-all for both.
backends = pytest.mark.parametrize(
    ("norm", "backend"),
    [
        pytest.param(NORMS[0], "aot_eager", id="layer_norm-aot_eager"),
        pytest.param(NORMS[0], "inductor", id="layer_norm-inductor"),
        pytest.param(NORMS[1], "aot_eager", id="rms_norm-aot_eager"),
        pytest.param(
            NORMS[1],
            "inductor",
            id="rms_norm-inductor",
            marks=pytest.mark.slow(reason="compiles C++ that is not ours; layer_norm's is in make test"),
        ),
    ],
)


def opcheck(op: Any, arguments: tuple, options: dict[str, Any] | None = None, *, traced: bool = True) -> None:
    """Three of torch's checks, and with ``traced`` the fourth."""
    how = {} if traced else {"test_utils": UNTRACED}
    optests.opcheck(op, arguments, options, **how)
