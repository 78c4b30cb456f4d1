"""Checks and times fusednorm on a GPU: values, bandwidth beside a copy and torch, host time, and the bars.

Values come first, and nothing is timed after a wrong one. Every throughput case then times in turn ours,
torch eager, for a few widths torch.compile, and a device copy of the same bytes: ``dst.copy_(src)`` reads and
writes one matrix as a forward does, ``torch.add(x, g, out=dst)`` reads two and writes one as a backward does.
Small launches are timed on the host: what a call costs before the GPU has even begun. Where --seconds do not
suffice the least important cases are left out, and named.

Exit status: 0 every bar is met, 1 one is not, 2 a value is wrong or nothing can be checked here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from shapes import DTYPES, FORWARD, FORWARD_BACKWARD, NORM_PARAMETERS, NORM_TITLES, Case, least_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
import reference  # noqa: E402  (the tests' float64 formulas, which no package installs)

EPS = 1e-5
BACKWARD = "backward"
# Most important first: what the bars speak of, then what is beside a power of two, then beyond 64K.
WIDTHS = (4096, 1024, 8192, 65536, 16384, 2048, 32768, 4097, 8191, 5120, 7168, 256, 512, 131072, 262144)
COMPILED_WIDTHS = (4096, 1024, 65536)  # compiling takes seconds for each
# Rows of each place where one may live, odd lengths among them, up to those that are read anew for each pass;
# many rows for the sums over them.
CHECKED_WIDTHS = (1, 7, 64, 257, 768, 1023, 2048, 4097, 8193, 16384, 32769, 65537, 262144)
CHECKED_SHAPES = (*((9, n) for n in CHECKED_WIDTHS), (1000, 33), (300, 1025), (2, 524_291), (2, 2_000_003))
HOST_SHAPES = tuple(itertools.product((1, 8, 64), (768, 4096)))
INPUT_BYTES = 2**28  # several times any L2 (60 MB on an H200), so that each pass finds its input gone from it
DRY_RUN_BYTES = 2**16
DTYPES_MEASURED = ("bf16", "fp32")
# In ulps of the row's largest. fp32: the limits of test_values.py; a gradient has more roundings behind it.
# 16 bits: one rounding, at the store.
MAX_ULPS = {"fp32": {"output": 4.0, "gradient": 8.0}, "bf16": {"output": 1.0, "gradient": 1.0}}
SAMPLES = 7
SAMPLE_SECONDS = 4e-3  # a group of calls this long makes the events' half microsecond vanish
HOST_CALLS = (
    200  # well below the thousand or so launches that the driver queues before it makes the host wait
)

Run = Callable[[], object]
Result = dict[str, Any]


# ---- What is measured --------------------------------------------------------------------------------


def moved_bytes(norm: str, rows: int, cols: int, dtype: str, direction: str) -> int:
    """The least bytes of a direction; a backward is what fwd+bwd moves beyond a forward."""
    forward = least_bytes(Case(norm, rows, cols, dtype, FORWARD, 1))
    both = least_bytes(Case(norm, rows, cols, dtype, FORWARD_BACKWARD, 1))
    return both - forward if direction == BACKWARD else forward


@dataclass(frozen=True)
class Inputs:
    """A case's tensors, the parameters of x's dtype, as in a model cast as a whole."""

    x: Tensor
    grad: Tensor
    parameters: tuple[Tensor, ...]

    @staticmethod
    def make(norm: str, rows: int, cols: int, dtype: str, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=DTYPES[dtype])

        parameters = tuple(normal(cols).requires_grad_() for _ in range(NORM_PARAMETERS[norm]))
        return Inputs(normal(rows, cols).requires_grad_(), normal(rows, cols), parameters)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, *self.parameters)


def forward_call(function: Callable[..., Tensor], inputs: Inputs) -> Run:
    """A forward as in inference. The caller sets the grad mode."""
    shape = list(inputs.x.shape[-1:])
    return lambda: function(inputs.x, shape, *inputs.parameters, EPS)


def backward_call(function: Callable[..., Tensor], inputs: Inputs) -> Run:
    """A backward alone: the graph of one forward, gone through again and again."""
    output = function(inputs.x, list(inputs.x.shape[-1:]), *inputs.parameters, EPS)
    return lambda: torch.autograd.grad(output, inputs.leaves, inputs.grad, retain_graph=True)


def step_call(function: Callable[..., Tensor], inputs: Inputs) -> Run:
    """A forward and its backward, as in training."""
    forward = forward_call(function, inputs)
    return lambda: torch.autograd.grad(forward(), inputs.leaves, inputs.grad)


def copy_call(inputs: Inputs, direction: str) -> Run:
    """What moves the direction's bytes and computes nothing worth mentioning."""
    x, grad = inputs.x.detach(), inputs.grad
    out = torch.empty_like(x)
    return (lambda: torch.add(x, grad, out=out)) if direction == BACKWARD else lambda: out.copy_(x)


# ---- Values --------------------------------------------------------------------------------------------


def check_values(device: str, shapes: tuple[tuple[int, int], ...]) -> list[Result]:
    """Output and gradients beside the float64 formulas.

    Inputs are made and compared on the CPU: under compute-sanitizer only our kernels are then slow.
    """
    results = []
    for norm, dtype, (rows, cols) in itertools.product(NORM_TITLES, DTYPES_MEASURED, shapes):
        inputs = Inputs.make(norm, rows, cols, dtype, "cpu")
        moved = Inputs(
            *(t.detach().to(device).requires_grad_(t.requires_grad) for t in (inputs.x, inputs.grad)),
            tuple(p.detach().to(device).requires_grad_() for p in inputs.parameters),
        )
        output = getattr(fusednorm.functional, norm)(moved.x, [cols], *moved.parameters, EPS)
        grads = torch.autograd.grad(output, moved.leaves, moved.grad)
        wide = [t.detach().double().requires_grad_() for t in inputs.leaves]
        expected = getattr(reference, norm)(*wide, eps=EPS)
        expected_grads = torch.autograd.grad(expected, wide, inputs.grad.double())
        names = ("output", "grad_input", "grad_weight", "grad_bias")
        # The gradients of a single column are differences of equal terms: only rounding is left of them.
        compared = zip(names, (output, *grads), (expected, *expected_grads), strict=False)
        for name, actual, want in itertools.islice(compared, 1 if cols == 1 else None):
            error = reference.ulps(actual.cpu(), want)
            limit = MAX_ULPS[dtype]["output" if name == "output" else "gradient"]
            case = {"norm": norm, "dtype": dtype, "rows": rows, "cols": cols, "what": name}
            results.append({**case, "ulps": error, "limit": limit, "ok": error <= limit})
    return results


# ---- Timing --------------------------------------------------------------------------------------------


def device_seconds(run: Run, calls: int) -> float:
    """Seconds of one call on the GPU, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def host_seconds(run: Run, calls: int) -> float:
    """Seconds until a call returns, whether or not its work is done."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def best_seconds(
    candidates: dict[str, Run], clock: Callable[[Run, int], float], calls: int | None, wait: Run
) -> dict[str, float]:
    """Each candidate's best sample. They take turns, so that a change of clocks hits all of them alike."""
    counts, best = {}, {}
    for name, run in candidates.items():
        run()  # loads kernels, and lets the allocator find its blocks
        wait()
        counts[name] = calls or max(1, min(50, math.ceil(SAMPLE_SECONDS / clock(run, 2))))
        best[name] = math.inf
    for _ in range(SAMPLES):
        for name, run in candidates.items():
            best[name] = min(best[name], clock(run, counts[name]))
            wait()
    return best


@dataclass
class Check:
    """One run of this program: what it measured, what it left out, and how much time it has."""

    device: str
    dry_run: bool
    deadline: float
    throughput: list[Result] = field(default_factory=list)
    host: list[Result] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)  # the longest case so far, by kind

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        # A dry run tests this program and not Inductor, which would take a minute on the CPU.
        backend = "eager" if self.dry_run else "inductor"
        return torch.compile(function, dynamic=False, backend=backend)

    def measure_throughput(self, norm: str, dtype: str, cols: int, with_compile: bool) -> None:
        """Forward and backward of one shape; a later call with compile adds to the earlier results."""
        size = DRY_RUN_BYTES if self.dry_run else INPUT_BYTES
        rows = max(1, size // (cols * DTYPES[dtype].itemsize))
        inputs = Inputs.make(norm, rows, cols, dtype, self.device)
        functions = {"ours": getattr(fusednorm.functional, norm)}
        if with_compile:
            functions["compile"] = self.compiled(getattr(F, norm))
        else:
            functions["eager"] = getattr(F, norm)
        clock = device_seconds if self.device == "cuda" else host_seconds
        for direction in (FORWARD, BACKWARD):
            with torch.set_grad_enabled(direction == BACKWARD):
                make = backward_call if direction == BACKWARD else forward_call
                candidates = {name: make(function, inputs) for name, function in functions.items()}
                candidates["copy"] = copy_call(inputs, direction)
                seconds = best_seconds(candidates, clock, None, self.wait)
            case = {"norm": norm, "dtype": dtype, "rows": rows, "cols": cols, "direction": direction}
            found = next((r for r in self.throughput if case.items() <= r.items()), None)
            if found is not None:  # the copy and ours, measured again beside compile, keep the better time
                for name, s in seconds.items():
                    found["us"][name] = min(s * 1e6, found["us"].get(name, math.inf))
            else:
                self.throughput.append({**case, "us": {name: s * 1e6 for name, s in seconds.items()}})

    def measure_host(self, norm: str, dtype: str, rows: int, cols: int) -> None:
        """What a small call costs the host, forward and training step."""
        inputs = Inputs.make(norm, rows, cols, dtype, self.device)
        functions = {"ours": getattr(fusednorm.functional, norm), "eager": getattr(F, norm)}
        for direction, make in ((FORWARD, forward_call), (FORWARD_BACKWARD, step_call)):
            with torch.set_grad_enabled(direction == FORWARD_BACKWARD):
                candidates = {name: make(function, inputs) for name, function in functions.items()}
                calls = 5 if self.dry_run else HOST_CALLS
                seconds = best_seconds(candidates, host_seconds, calls, self.wait)
            case = {"norm": norm, "dtype": dtype, "rows": rows, "cols": cols, "direction": direction}
            self.host.append({**case, "us": {name: s * 1e6 for name, s in seconds.items()}})

    def plan(self, widths: tuple[int, ...]) -> Iterator[tuple[str, str, Run]]:
        """(kind, name, call), the most important first."""
        pairs = list(itertools.product(DTYPES_MEASURED, NORM_TITLES))
        for cols, (dtype, norm) in itertools.product(widths, pairs):
            name = f"{NORM_TITLES[norm]} {dtype} N={cols}"
            yield "throughput", name, lambda a=(norm, dtype, cols, False): self.measure_throughput(*a)
            if cols == widths[0] and (dtype, norm) == pairs[-1]:
                for (rows, n), (d, m) in itertools.product(HOST_SHAPES, pairs):
                    host_name = f"{NORM_TITLES[m]} {d} {rows}x{n} on the host"
                    yield "host", host_name, lambda a=(m, d, rows, n): self.measure_host(*a)
        for cols, (dtype, norm) in itertools.product([n for n in COMPILED_WIDTHS if n in widths], pairs):
            name = f"{NORM_TITLES[norm]} {dtype} N={cols} with torch.compile"
            yield "compile", name, lambda a=(norm, dtype, cols, True): self.measure_throughput(*a)

    def run(self, widths: tuple[int, ...]) -> None:
        for kind, name, call in self.plan(widths):
            # A case takes about as long as the longest of its kind; of the first one we only guess.
            expected = self.slowest.get(kind, {"compile": 20.0}.get(kind, 1.0))
            if not self.dry_run and time.monotonic() + expected > self.deadline:
                self.dropped.append(name)
                continue
            start = time.monotonic()
            call()
            self.slowest[kind] = max(self.slowest.get(kind, 0.0), time.monotonic() - start)


# ---- Bars and output -----------------------------------------------------------------------------------


def gb_per_s(r: Result, name: str) -> float:
    """Useful bytes a second; a copy moves the matrices alone, without parameters."""
    units = 3 if r["direction"] == BACKWARD else 2
    matrices = units * r["rows"] * r["cols"] * DTYPES[r["dtype"]].itemsize
    shape = (r["norm"], r["rows"], r["cols"], r["dtype"], r["direction"])
    return (matrices if name == "copy" else moved_bytes(*shape)) / r["us"][name] / 1e3


def of_copy(r: Result) -> float:
    """Our bandwidth over the copy's."""
    return gb_per_s(r, "ours") / gb_per_s(r, "copy")


def speedup(r: Result, other: str) -> float:
    """Another's time over ours."""
    return float(r["us"][other] / r["us"]["ours"])


def case_name(r: Result) -> str:
    return f"{NORM_TITLES[r['norm']]} {r['dtype']} {r['rows']}x{r['cols']} {r['direction']}"


def bars(throughput: list[Result], host: list[Result]) -> list[Result]:
    """The project's bars, each with its worst case. A bar of which nothing was measured is not passed."""
    middle = [r for r in throughput if 1024 <= r["cols"] <= 65536]
    forward = [r for r in middle if r["direction"] == FORWARD]
    backward = [r for r in middle if r["direction"] == BACKWARD]
    cliffs = []
    by_case = {(r["norm"], r["dtype"], r["direction"], r["cols"]): r for r in throughput}
    for (norm, dtype, direction, cols), r in by_case.items():
        for neighbour in (cols - 1, cols + 1):
            beside = by_case.get((norm, dtype, direction, neighbour))
            if beside is not None and cols % 2:  # 4097 beside 4096, 8191 beside 8192
                cliffs.append((gb_per_s(r, "ours") / gb_per_s(beside, "ours"), r))
    rows: list[tuple[str, float, list[tuple[float, Result]]]] = [
        ("forward, share of the copy's bandwidth, N in 1K..64K", 0.90, [(of_copy(r), r) for r in forward]),
        ("backward, share of the copy's bandwidth, N in 1K..64K", 0.85, [(of_copy(r), r) for r in backward]),
        (
            "backward, times as fast as torch eager, everywhere",
            1.3,
            [(speedup(r, "eager"), r) for r in throughput if r["direction"] == BACKWARD],
        ),
        ("host time of a small call, torch's over ours", 1.0, [(speedup(r, "eager"), r) for r in host]),
        ("an odd width's bandwidth over its neighbour's", 0.85, cliffs),
    ]
    results = []
    for what, least, values in rows:
        worst = min(values, key=lambda v: v[0], default=None)
        missed = sum(value < least for value, _ in values)
        verdict = "NOT MEASURED" if worst is None else "FAIL" if missed else "PASS"
        results.append(
            {
                "bar": what,
                "least": least,
                "verdict": verdict,
                "cases": len(values),
                "missed": missed,
                "worst": worst and worst[0],
                "worst_case": worst and case_name(worst[1]),
            }
        )
    return results


def throughput_table(results: list[Result]) -> str:
    head = f"{'case':<40}{'ours us':>9}{'GB/s':>7}{'copy GB/s':>11}{'of copy':>9}"
    lines = [head + f"{'eager us':>10}{'x eager':>9}{'compile us':>12}{'x compile':>11}"]
    for r in sorted(results, key=lambda r: (r["norm"], r["direction"], r["dtype"], r["cols"])):
        line = f"{case_name(r):<40}{r['us']['ours']:>9.1f}{gb_per_s(r, 'ours'):>7.0f}"
        line += f"{gb_per_s(r, 'copy'):>11.0f}{of_copy(r):>9.1%}"
        for name, width in (("eager", 10), ("compile", 12)):
            if name in r["us"]:
                line += f"{r['us'][name]:>{width}.1f}{speedup(r, name):>{width - 1}.2f}"
            else:
                line += f"{'-':>{width}}{'-':>{width - 1}}"
        lines.append(line)
    return "\n".join(lines)


def host_table(results: list[Result]) -> str:
    lines = [f"{'host time of a call':<40}{'ours us':>9}{'eager us':>10}{'x eager':>9}"]
    for r in results:
        us = r["us"]
        lines.append(f"{case_name(r):<40}{us['ours']:>9.2f}{us['eager']:>10.2f}{speedup(r, 'eager'):>9.2f}")
    return "\n".join(lines)


def bars_table(results: list[Result]) -> str:
    lines = []
    for r in results:
        line = f"{r['verdict']:<13}{r['bar']}: at least {r['least']:g}"
        if r["worst"] is not None:
            line += f"; worst {r['worst']:.2f} ({r['worst_case']}), {r['missed']} of {r['cases']} below"
        lines.append(line)
    return "\n".join(lines)


def plot(results: list[Result], title: str, path: Path) -> bool:
    """A panel for each norm and direction: GB/s over the width. False where there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return False
    figure, panels = plt.subplots(2, 2, figsize=(13, 9), sharex=True, layout="constrained")
    for (norm, direction), axes in zip(
        itertools.product(NORM_TITLES, (FORWARD, BACKWARD)), panels.flat, strict=True
    ):
        for dtype, (name, style) in itertools.product(
            DTYPES_MEASURED,
            {"copy": ":", "ours": "o-", "eager": "x--", "compile": "s"}.items(),
        ):
            chosen = [
                r
                for r in results
                if (r["norm"], r["direction"], r["dtype"]) == (norm, direction, dtype) and name in r["us"]
            ]
            chosen.sort(key=lambda r: r["cols"])
            axes.plot(
                [r["cols"] for r in chosen],
                [gb_per_s(r, name) for r in chosen],
                style,
                color=f"C{DTYPES_MEASURED.index(dtype)}",
                alpha=1.0 if name == "ours" else 0.6,
                markersize=5,
                label=f"{dtype} {name}",
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_title(f"{NORM_TITLES[norm]} {direction}")
        axes.set(xlabel="row length N", ylabel="GB/s of useful bytes")
    panels.flat[0].legend(fontsize="small", ncols=2)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def machine(device: str) -> Result:
    """What the numbers were measured on."""
    info: Result = {"device": device, "torch": torch.__version__, "fusednorm": fusednorm.build_info()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        info["gpu"] = properties.name
        info["capability"] = list(torch.cuda.get_device_capability(0))
        info["multiprocessors"] = properties.multi_processor_count
        info["l2_bytes"] = getattr(properties, "L2_cache_size", None)
    return info


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "build/gpu_check", metavar="DIR", help="(build/gpu_check)")
    add("--seconds", type=float, default=240.0, help="time to stay inside, about (default: %(default)g)")
    add("--values-only", action="store_true", help="check the values and time nothing")
    add("--dry-run", action="store_true", help="all of it on the CPU with tiny shapes: tests this program")
    args = parser.parse_args()
    if not args.dry_run:
        if not torch.cuda.is_available():
            parser.error("there is no GPU here: nothing was checked (--dry-run tests the program itself)")
        if fusednorm.build_info()["cuda"] is None:
            parser.error("this fusednorm was built without CUDA: nothing was checked; rebuild it with nvcc")
    return args


def main() -> int:
    """Checks, measures, prints, stores."""
    start = time.monotonic()
    args = arguments()
    device = "cpu" if args.dry_run else "cuda"
    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    # The compiled backward would otherwise give its saved tensors away, and run only once.
    torch._functorch.config.donated_buffer = False

    # The longest rows take a CPU seconds, and have no kernel of their own there.
    shapes = tuple(s for s in CHECKED_SHAPES if not args.dry_run or s[1] < 2**17)
    values = check_values(device, shapes)
    wrong = [v for v in values if not v["ok"]]
    for v in wrong:
        what = f"{NORM_TITLES[v['norm']]} {v['dtype']} {v['rows']}x{v['cols']} {v['what']}"
        print(f"WRONG  {what}: off by {v['ulps']:.2f} ulps, at most {v['limit']:g} allowed")
    print(f"values: {len(values) - len(wrong)} of {len(values)} agree with float64", flush=True)
    if args.values_only:
        return 2 if wrong else 0

    check = Check(device, args.dry_run, start + args.seconds)
    widths = (4096, 4097, 256) if args.dry_run else WIDTHS
    if not wrong:
        check.run(widths)
    verdicts = bars(check.throughput, check.host)
    title = "dry run on the CPU: no measurement" if args.dry_run else torch.cuda.get_device_name(0)
    drawn = plot(
        check.throughput, f"fusednorm, {title}, torch {torch.__version__}", args.out / "gpu_check.png"
    )
    run = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dry_run": args.dry_run,
        "machine": machine(device),
        "values": values,
        "throughput": [
            r | {"gb_per_s": gb_per_s(r, "ours"), "of_copy": of_copy(r)} for r in check.throughput
        ],
        "host": check.host,
        "bars": verdicts,
        "dropped": check.dropped,
        "plot": "gpu_check.png" if drawn else None,
        "seconds": time.monotonic() - start,
    }
    (args.out / "gpu_check.json").write_text(json.dumps(run, indent=1) + "\n")

    if wrong:
        print("nothing was timed: values come first")
        return 2
    print(f"\n{throughput_table(check.throughput)}\n\n{host_table(check.host)}\n")
    print(f"{title}, torch {torch.__version__}; input of {INPUT_BYTES >> 20} MiB a case" * (not args.dry_run))
    if check.dropped:
        print(f"left out for lack of time ({args.seconds:g} s): {'; '.join(check.dropped)}")
    if not drawn:
        print("no plot: matplotlib is missing here")
    print(f"{run['seconds']:.0f} s; wrote gpu_check.json{' and gpu_check.png' * drawn} to {args.out}\n")
    print(bars_table(verdicts))
    met = sum(v["verdict"] == "PASS" for v in verdicts)
    if args.dry_run:
        print("dry run: tiny shapes on a CPU; these numbers and verdicts mean nothing")
        return 0
    left_out = f"; {len(check.dropped)} cases left out" if check.dropped else ""
    print(f"{met} of {len(verdicts)} bars met{left_out}")
    return int(met < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
