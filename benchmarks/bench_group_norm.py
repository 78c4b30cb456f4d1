"""GroupNorm beside torch eager on the CPU: forward + backward, channels first and channels last.

Values are checked against float64 before anything is timed. Prints a table of times and of the ratios to
eager, and writes them as JSON. ``python benchmarks/bench_group_norm.py --threads 1``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from machine import describe
from timing import best_seconds, keep_memory

# Samples x channels x height x width, groups: of convolutional and diffusion networks, odd and short ones.
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((8, 320, 32, 32), 32),
    ((2, 320, 64, 64), 32),
    ((8, 512, 7, 7), 32),
    ((8, 256, 14, 14), 256),
    ((4, 64, 56, 56), 64),
    ((64, 192, 8, 8), 32),
    ((32, 64, 5, 3), 8),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
BAR = 0.7  # of eager's forward + backward


def run_of(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], groups: int) -> Callable[[], object]:
    """Forward and backward of ``function`` on x, weight, bias; the last of ``tensors`` is grad_output."""
    *inputs, grad = tensors
    x, weight, bias = (t.detach().requires_grad_() for t in inputs)
    return lambda: torch.autograd.grad(function(x, groups, weight, bias), (x, weight, bias), grad)


def check(tensors: tuple[Tensor, ...], groups: int, dtype: torch.dtype) -> None:
    """Ours against torch in float64: the output in ulps of its largest value, gradients likewise."""
    *inputs, grad = tensors
    wide = [t.double().requires_grad_() for t in inputs]
    expected = F.group_norm(wide[0], groups, wide[1], wide[2])
    expected_grads = torch.autograd.grad(expected, wide, grad.double())
    narrow = [t.detach().requires_grad_() for t in inputs]
    actual = fusednorm.functional.group_norm(narrow[0], groups, narrow[1], narrow[2])
    grads = torch.autograd.grad(actual, narrow, grad)
    for a, e in zip((actual, *grads), (expected, *expected_grads), strict=True):
        error = (
            float((a.detach().double() - e.detach()).abs().max() / e.detach().abs().max())
            / torch.finfo(dtype).eps
        )
        if not error <= 16:  # sums of up to 10^5 terms of both signs: more than the few ulps of an output
            raise AssertionError(
                f"GroupNorm: {error:.1f} ulps from float64 for {tuple(inputs[0].shape)} {dtype}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    parser.add_argument("--json", type=Path, default=Path("build/bench/group_norm.json"))
    args = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    results = []
    print(f"{'shape':>18} groups  dtype  channels     ours ms    eager ms   ours/eager")
    for shape, groups in SHAPES:
        for dtype_name, dtype in DTYPES.items():
            for format_name, memory_format in FORMATS.items():
                x, grad = (torch.randn(shape).to(dtype).to(memory_format=memory_format) for _ in range(2))
                weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)
                tensors = (x, weight, bias, grad)
                torch.set_num_threads(args.threads)
                check(tensors, groups, dtype)
                seconds = best_seconds(
                    {
                        "ours": run_of(fusednorm.functional.group_norm, tensors, groups),
                        "eager": run_of(F.group_norm, tensors, groups),
                    },
                    args.seconds,
                )
                ratio = seconds["ours"] / seconds["eager"]
                results.append(
                    {
                        "shape": shape,
                        "groups": groups,
                        "dtype": dtype_name,
                        "channels": format_name,
                        **seconds,
                    }
                )
                name = "x".join(map(str, shape))
                times = f"{seconds['ours'] * 1e3:10.3f}  {seconds['eager'] * 1e3:10.3f}  {ratio:10.2f}"
                remark = "" if ratio <= BAR else f"  above {BAR}"
                print(
                    f"{name:>18} {groups:6d}  {dtype_name:>5}  {format_name:>8}  {times}{remark}", flush=True
                )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"machine": describe(), "threads": args.threads, "results": results}, indent=1)
    )


if __name__ == "__main__":
    main()
