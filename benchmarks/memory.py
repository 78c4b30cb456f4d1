"""Peak extra memory of a forward and backward, from the profiler's record of every allocation."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from candidates import candidates, make_inputs
from shapes import DTYPES, FORWARD_BACKWARD, NORM_PARAMETERS, Case

# The workspace that is allowed: sums of rows for each parameter, at most this many or one per so many rows,
# whichever is more; and each parameter once in the accumulation type.
MAX_PARTIALS = 64
ROWS_PER_PARTIAL = 1024
# What an allocator or autograd itself may take.
SLACK_BYTES = 64 * 1024


def bound_bytes(case: Case) -> dict[str, int]:
    """Outputs, row statistics and workspace: what may be allocated beside the inputs."""
    element = DTYPES[case.dtype].itemsize
    acc = 8 if case.dtype == "fp64" else 4
    parameters = NORM_PARAMETERS[case.norm]
    partials = max(MAX_PARTIALS, -(-case.rows // ROWS_PER_PARTIAL))
    return {
        "outputs": 2 * case.rows * case.cols * element + parameters * case.cols * element,
        "statistics": parameters * case.rows * acc,
        "workspace": parameters * case.cols * acc * (partials + 1) + SLACK_BYTES,
    }


def peak_bytes(case: Case) -> int:
    """The most memory that was allocated at one time during one call."""
    run = candidates(case, make_inputs(case.norm, *case.shape, *case.dtypes), compiled=False)["ours"]
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: float(e["ts"])):
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak


def measure(threads: int) -> list[dict[str, Any]]:
    """The peak and its bound for both norms at a few shapes."""
    torch.set_num_threads(threads)
    results = []
    for norm in ("layer_norm", "rms_norm"):
        for rows, cols, dtype in ((2048, 768, "fp32"), (2048, 768, "bf16"), (512, 4096, "bf16")):
            case = Case(norm, rows, cols, dtype, FORWARD_BACKWARD, threads)
            bound = bound_bytes(case)
            results.append(
                {"case": str(case), "peak": peak_bytes(case), "bound": sum(bound.values())} | bound
            )
    return results
