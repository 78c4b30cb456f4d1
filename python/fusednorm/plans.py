"""What the CUDA kernels do with a shape: the launch plan, printed. Works on any build, without a GPU."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusednorm.torch_support.loading import _C

_SMS = (108, 132, 148, 170)  # A100, H100 and H200, B200, RTX 5090

_MEMORY = {
    "units": "units of a thread",
    "unit_bytes": "bytes of a unit: one access",
    "shared_bytes": "shared memory of a block",
    "max_registers": "registers of a thread, at most",
    "blocks_per_sm": "blocks on an SM, at least",
    "bytes_in_flight": "bytes in flight on an SM",
}
_FORWARD = {
    "kernel": "where a row stays between the passes over it",
    "threads_per_row": "threads that share a row",
    "rows_per_block": "rows of a block",
    "threads": "threads of a block",
    "cluster": "blocks that share a row",
    **_MEMORY,
}
_BACKWARD = {
    "launches": "launches, apart from the sum of the groups",
    "threads_per_row": "threads that share a row",
    "rows_per_block": "rows that a block works on at once",
    "threads": "threads of a block",
    "cluster": "blocks that share a row in a cluster",
    "groups": "groups of rows, summed apart",
    "blocks": "blocks of the grid",
    "stages": "rows of the ring: one worked on, the others on their way",
    **_MEMORY,
    "partial_share": "partial sums, as a share of the rows' traffic",
}


def explain(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    arch: int | None = None,
    *,
    norm: str = "layer_norm",
    normalized_dims: int = 1,
    out_dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Any]]:
    """Print, and return, how the CUDA kernels are launched for an input.

    Args:
        shape: of the input; its last ``normalized_dims`` dimensions make a row.
        dtype: of the input, one of float64, float32, bfloat16, float16.
        arch: compute capability as a number: 80, 90, 100, 120. None: the current device's, or 90 where
            there is none.
        norm: ``"layer_norm"`` or ``"rms_norm"`` (one gradient of parameters less to sum).
        normalized_dims: how many dimensions a row has.
        out_dtype: of the output and grad_output; None: the input's. float32 beside 16 bits, under autocast.

    Returns:
        ``{"forward": {...}, "backward": {...}}``; sizes in bytes, ``quantisation_loss`` by number of SMs.

    Raises:
        RuntimeError: a dtype, norm or shape there are no kernels for.
    """
    if arch is None:
        arch = 90
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            arch = 10 * major + minor
    leading = len(shape) - normalized_dims
    if leading < 0 or normalized_dims < 1:
        raise RuntimeError(
            f"fusednorm.explain: shape: expected at least normalized_dims = {normalized_dims} >= 1 "
            f"dimensions, got {list(shape)}"
        )
    rows, cols = math.prod(shape[:leading]), math.prod(shape[leading:])
    plan: dict[str, dict[str, Any]] = _C.explain(
        rows, cols, str(dtype)[6:], str(out_dtype or dtype)[6:], norm, arch
    )
    backward = plan["backward"]
    backward["quantisation_loss"] = {sms: _C.quantisation_loss(backward["blocks"], sms) for sms in _SMS}

    print(f"{norm} of {rows} rows of {cols} {str(dtype)[6:]} on sm_{arch}")
    for title, names in (("forward", _FORWARD), ("backward", _BACKWARD)):
        print(f"  {title}")
        for key, meaning in names.items():
            value = plan[title][key]
            text = f"{value:.1%}" if key == "partial_share" else f"{value:,}" if key != "kernel" else value
            print(f"    {text:>16}  {meaning}")
    losses = ", ".join(f"{loss:.1%} of {sms}" for sms, loss in backward["quantisation_loss"].items())
    print(f"    SMs idle because blocks do not divide: {losses}")
    return plan
