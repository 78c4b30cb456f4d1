"""Measures the cases of one plan in a process of its own: the environment picks instruction set and malloc.

Run by bench_norms.py: ``worker.py PLAN RESULTS``, both JSON files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import memory
from candidates import candidates, check, make_inputs
from shapes import (
    ADD_BAR_SHAPES,
    BAR_SHAPES,
    BIG_SHAPE,
    FORWARD,
    FORWARD_BACKWARD,
    FRESH,
    MODULE_DIRECTIONS,
    NORM_TITLES,
    REFERENCE_SHAPES,
    Case,
    least_bytes,
)
from timing import best_seconds, interruptions, keep_memory


def budget_of(case: Case, scale: float) -> float:
    """Seconds for a case, all candidates together: the bars' own shapes get the most."""
    if case.direction in MODULE_DIRECTIONS:
        return 0.3 * scale
    if case.shape in (*BAR_SHAPES, BIG_SHAPE):
        return 0.6 * scale
    return (0.35 if case.shape in REFERENCE_SHAPES else 0.25) * scale


def is_compiled(case: Case) -> bool:
    """Whether torch.compile is worth its time: where a bar names it."""
    shapes = BAR_SHAPES if case.norm in NORM_TITLES else ADD_BAR_SHAPES
    plain = not case.isa and case.memory != FRESH
    return plain and case.shape in shapes and case.direction in (FORWARD, FORWARD_BACKWARD)


def measure(case: Case, scale: float, compiled: bool) -> dict[str, Any]:
    """Checks and times one case."""
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case.norm, case.rows, case.cols, *case.dtypes)
    with torch.set_grad_enabled(case.grad):
        runs = candidates(case, inputs, compiled and is_compiled(case))
        ulps = check(case, inputs, runs)
        if "compile" in runs:
            runs["compile"]()  # compiles here, outside of the budget
        before, start = interruptions(), time.perf_counter()
        best = best_seconds(runs, budget_of(case, scale), {"onnxruntime"} if case.threads > 1 else ())
        interrupted = (interruptions() - before) / (time.perf_counter() - start)
    return asdict(case) | {
        "ms": {name: seconds * 1e3 for name, seconds in best.items()},
        "ulps": ulps,
        "gb_per_s": least_bytes(case) / best["ours"] / 1e9,
        "interruptions_per_s": round(interrupted, 1),
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    kept = plan["keep_memory"] and keep_memory()
    cases = [Case(**fields) for fields in plan["cases"]]
    results = []
    with tqdm(cases, unit="case", disable=not plan["progress"]) as progress:
        for case in progress:
            progress.set_postfix_str(str(case))
            results.append(measure(case, plan["scale"], plan["compile"]))
    out = {"results": results, "keeps_memory": kept}
    if plan["memory"]:
        out["memory"] = memory.measure(os.cpu_count() or 1)
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
