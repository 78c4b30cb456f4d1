"""Times fusednorm beside torch on the CPU: checks the values, times, and writes a table, a JSON and a plot.

Every case times, in turn and in one run, ours, torch eager's ``F.layer_norm`` or ``F.rms_norm``, and the copy
limit: ``x.clone()`` moves the bytes of a forward, ``torch.add(x, g)`` those of a backward. Freed memory stays
with the process unless --default-malloc says otherwise: page faults would cost more than the norms do.
"""

from __future__ import annotations

import ctypes
import functools
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter
from torch import Tensor
from tqdm import tqdm

import fusednorm
from shapes import (
    DIRECTIONS,
    DTYPES,
    NORM_PARAMETERS,
    NORM_TITLES,
    Case,
    cases,
    least_bytes,
    parse_arguments,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import reference  # noqa: E402  (the tests' float64 formulas, which no package installs)

matplotlib.use("Agg")

EPS = 1e-5
CHECK_ROWS = 64
MAX_ULPS = 4.0
SECONDS_PER_CASE = 1.6
QUICK_SECONDS_PER_CASE = 0.2
SAMPLE_SECONDS = 1e-3  # short calls are timed in groups as long as this: the clock and the loop cost nothing
MIN_SAMPLES = 3
# Threads wait for the one that another process pushed aside, 4 ms or more each time, and then even the best
# sample tells nothing. In interruptions a second; a judgement, not a measured bound.
NOISY_INTERRUPTIONS = 50.0

Result = dict[str, Any]  # a case's fields, "ms" by candidate, "gb_per_s" of ours
Run = Callable[[], object]


class Inputs(NamedTuple):
    """What one case computes on. The parameters are of x's dtype, as in a model cast as a whole."""

    x: Tensor
    grad: Tensor
    parameters: tuple[Tensor, ...]

    def head(self, rows: int) -> Inputs:
        """The first rows alone, apart from this one's autograd graph."""
        parameters = tuple(p.detach().requires_grad_() for p in self.parameters)
        return Inputs(self.x.detach()[:rows].requires_grad_(), self.grad[:rows], parameters)


@functools.lru_cache(maxsize=1)
def make_inputs(norm: str, rows: int, cols: int, dtype: str) -> Inputs:
    """Normal inputs from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[dtype])

    parameters = tuple(normal(cols).requires_grad_() for _ in range(NORM_PARAMETERS[norm]))
    return Inputs(normal(rows, cols).requires_grad_(), normal(rows, cols), parameters)


def norm_call(function: Callable[..., Tensor], inputs: Inputs, backward: bool) -> Callable[[], Any]:
    """A call of a norm: its output or, with backward, the gradients. The caller sets the grad mode."""
    x, grad, parameters = inputs
    shape = list(x.shape[-1:])
    if not backward:
        return lambda: (function(x, shape, *parameters, EPS),)
    wanted = (x, *parameters)
    return lambda: torch.autograd.grad(function(x, shape, *parameters, EPS), wanted, grad)


def limit_call(inputs: Inputs, backward: bool) -> Run:
    """Moves the bytes that the case must move, and computes nothing."""
    x, grad = inputs.x.detach(), inputs.grad
    return (lambda: (x.clone(), torch.add(x, grad))) if backward else x.clone


def check(case: Case, function: Callable[..., Tensor], inputs: Inputs) -> None:
    """Raises where the first rows differ from the float64 formulas by over 4 ulp of the row's largest."""
    few = inputs.head(CHECK_ROWS)
    actual = norm_call(function, few, case.backward)()
    # A gradient has its leaf's dtype, and rounded ones are no reference: the leaves are doubles.
    doubles = [t.detach().double().requires_grad_() for t in (few.x, *few.parameters)]
    output = getattr(reference, case.norm)(*doubles, eps=EPS)
    expected: tuple[Tensor, ...] = (output,)
    names = ["output"]
    if case.backward:
        expected = torch.autograd.grad(output, doubles, few.grad.double())
        names = ["gradient of x", "gradient of the weight", "gradient of the bias"][: len(expected)]
    for name, a, e in zip(names, actual, expected, strict=True):
        error = reference.ulps(a, e)
        if not error <= MAX_ULPS:
            raise RuntimeError(f"{case}: the {name} is off by {error:.1f} ulp (at most {MAX_ULPS:g} allowed)")


def timed(run: Run, calls: int) -> float:
    """Seconds of one call, as the mean of so many."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def interruptions() -> int:
    """How often the system took a processor from this process for another one's sake."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def best_seconds(candidates: dict[str, Run], budget: float) -> dict[str, float]:
    """Each candidate's best sample. They take turns, so that a noisy moment hits all of them alike.

    A candidate leaves when it has used its share of the budget, and so a slow one does not eat the others'.
    """
    calls, best, spent, samples = {}, {}, {}, {}
    for name, run in candidates.items():
        first = timed(run, 1)
        second = first if first > budget / 4 else timed(run, 1)  # a slow call needs no warm-up
        calls[name] = max(1, round(SAMPLE_SECONDS / second))
        best[name], spent[name], samples[name] = second, first + second, 0
    share = budget / len(candidates)
    turn = list(candidates)
    while turn:
        for name in list(turn):
            seconds = timed(candidates[name], calls[name])
            best[name] = min(best[name], seconds)
            spent[name] += seconds * calls[name]
            samples[name] += 1
            if spent[name] >= share and samples[name] >= MIN_SAMPLES:
                turn.remove(name)
        turn = turn[1:] + turn[:1]  # nobody always comes after the same one, and finds its caches
    return best


def measure(case: Case, budget: float, compiled: bool) -> Result:
    """Checks and times one case."""
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case.norm, case.rows, case.cols, case.dtype)
    functions = {"ours": getattr(fusednorm.functional, case.norm), "eager": getattr(F, case.norm)}
    if compiled:
        torch._dynamo.reset()  # each case compiles for its own shape and thread count
        functions["compile"] = torch.compile(functions["eager"], dynamic=False)
    with torch.set_grad_enabled(case.backward):
        check(case, functions["ours"], inputs)
        candidates: dict[str, Run] = {
            name: norm_call(function, inputs, case.backward) for name, function in functions.items()
        }
        candidates["limit"] = limit_call(inputs, case.backward)
        if compiled:
            candidates["compile"]()  # compiles here, outside of the budget
        before, start = interruptions(), time.perf_counter()
        best = best_seconds(candidates, budget)
        interrupted = (interruptions() - before) / (time.perf_counter() - start)
    return asdict(case) | {
        "ms": {name: seconds * 1e3 for name, seconds in best.items()},
        "gb_per_s": least_bytes(case) / best["ours"] / 1e9,
        "interruptions_per_s": round(interrupted, 1),
    }


def keep_memory() -> bool:
    """Stops glibc's malloc from handing freed memory back; False where there is no such malloc.

    By default each large output comes in new pages, which cost up to five times the norm itself, and whether
    a middling one does depends on what was freed before: the same case then takes 0.7 ms or 5 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4  # the parameters' numbers in malloc.h
    return mallopt is not None and bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def ratio(result: Result, other: str) -> float:
    """Our time over another's."""
    return float(result["ms"]["ours"] / result["ms"][other])


def is_noisy(result: Result) -> bool:
    """Whether other processes kept this case from running undisturbed."""
    return float(result["interruptions_per_s"]) > NOISY_INTERRUPTIONS


def case_of(result: Result) -> Case:
    """The case of a result, which may come from a file."""
    return Case(**{field: result[field] for field in Case.__dataclass_fields__})


def text_table(results: Sequence[Result]) -> str:
    """The table for a terminal, and a note on every case that eager wins."""
    compiled = "compile" in results[0]["ms"]
    head = f"{'case':<46}{'ours ms':>10}{'eager ms':>10}{'ours/eager':>12}{'ours/limit':>12}{'GB/s ours':>11}"
    lines = [head + ("compile ms".rjust(12) + "ours/compile".rjust(14) if compiled else "")]
    for r in results:
        ms = r["ms"]
        line = f"{case_of(r)!s:<46}{ms['ours']:>10.3f}{ms['eager']:>10.3f}{ratio(r, 'eager'):>12.2f}"
        line += f"{ratio(r, 'limit'):>12.2f}{r['gb_per_s']:>11.1f}"
        line += f"{ms['compile']:>12.3f}{ratio(r, 'compile'):>14.2f}" if compiled else ""
        lines.append(line + "  disturbed" * is_noisy(r))
    slower = [r for r in results if ratio(r, "eager") > 1.0]
    lines.append(f"\n{len(slower)} of {len(results)} cases take over 1.00 of eager's time")
    lines += [f"  {case_of(r)}: {ratio(r, 'eager'):.3f}{', disturbed' * is_noisy(r)}" for r in slower]
    return "\n".join(lines)


def markdown(run: dict[str, Any]) -> str:
    """The README's tables: a row for each shape and dtype, a column for each direction and thread count."""
    by_case = {case_of(r): r for r in run["results"]}
    threads = sorted({case.threads for case in by_case})
    columns = [(d, t) for d in DIRECTIONS for t in threads]
    heads = [f"{d} {t} thread{'s' if t > 1 else ''}" for d, t in columns]
    lines = []
    for norm in dict.fromkeys(case.norm for case in by_case):
        lines += [f"| {NORM_TITLES[norm]} | dtype | " + " | ".join(heads) + " |"]
        lines += ["|---|---|" + "---:|" * len(columns)]
        keys = dict.fromkeys((c.rows, c.cols, c.dtype) for c in by_case if c.norm == norm)
        for rows, cols, dtype in sorted(keys, key=lambda key: key[0] * key[1]):
            found = [by_case[Case(norm, rows, cols, dtype, d, t)] for d, t in columns]
            cells = [f"{r['ms']['ours']:.3f} ms ({ratio(r, 'eager'):.2f} of eager)" for r in found]
            lines.append(f"| {rows}x{cols} | {dtype} | " + " | ".join(cells) + " |")
        lines.append("")
    memory = "freed memory kept" if run["keeps_memory"] else "the default malloc"
    return "\n".join([*lines, f"{run['cpu']}, torch {run['torch']}, {memory}, {run['date'][:10]}."])


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Two panels of bars grouped by shape: time over the limit's, and speed-up over eager."""
    by_case = {case_of(r): r for r in results}
    sections = list(dict.fromkeys((c.norm, d) for d in DIRECTIONS for c in by_case))
    sections.sort(key=lambda s: list(NORM_TITLES).index(s[0]))
    shapes = list(dict.fromkeys((c.rows, c.cols) for c in by_case))
    series = list(dict.fromkeys((c.dtype, c.threads) for c in by_case))
    dtypes = list(dict.fromkeys(dtype for dtype, _ in series))
    most = max(threads for _, threads in series)
    width = 0.84 / len(series)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(max(8.0, 1.0 * len(sections) * len(shapes)), 9), sharex=True, layout="constrained"
    )
    groups = [(s, shape) for s in sections for shape in shapes]
    # A gap of half a group sets the sections apart.
    at = [i + 0.5 * (i // len(shapes)) for i in range(len(groups))]
    for j, (dtype, threads) in enumerate(series):
        found = [by_case[Case(n, *shape, dtype, d, threads)] for (n, d), shape in groups]
        x = [a + (j - (len(series) - 1) / 2) * width for a in at]
        alpha = 0.45 + 0.55 * threads / most if most > 1 else 1.0
        style = {"color": f"C{dtypes.index(dtype)}", "alpha": alpha, "width": width * 0.92}
        top.bar(
            x,
            [ratio(r, "limit") for r in found],
            label=f"{dtype}, {threads} thread{'s' if threads > 1 else ''}",
            **style,
        )
        # Bars that start at 1 on a logarithmic axis: up is faster than eager, down is slower.
        bottom.bar(x, [1 / ratio(r, "eager") - 1 for r in found], bottom=1, **style)
    for axes, label in ((top, "time / copy limit"), (bottom, "speed-up over torch eager")):
        axes.axhline(1, color="black", linewidth=1)
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    bottom.set_yscale("log", base=2)
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    bottom.yaxis.set_minor_formatter(NullFormatter())
    bottom.set_xticks(at, [f"{rows}x{cols}" for _, (rows, cols) in groups], rotation=35, ha="right")
    for k, (norm, direction) in enumerate(sections):
        middle = at[k * len(shapes)] + (len(shapes) - 1) / 2
        for axes in (top, bottom):
            text = f"{NORM_TITLES[norm]} {direction}"
            axes.text(middle, 1.01, text, ha="center", va="bottom", transform=axes.get_xaxis_transform())
    top.legend(ncols=len(series), loc="upper right", fontsize="small")
    top.set_ylim(top=top.get_ylim()[1] * 1.12)  # room for the legend
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measures, prints and stores."""
    args = parse_arguments(__doc__)
    if args.from_json:
        print(markdown(args.stored))
        return
    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    kept = not args.default_malloc and keep_memory()
    budget = QUICK_SECONDS_PER_CASE if args.quick else SECONDS_PER_CASE
    results = []
    with tqdm(list(cases(args.norms, args.shapes, args.dtypes, args.threads)), unit="case") as progress:
        for case in progress:
            progress.set_postfix_str(str(case))
            results.append(measure(case, budget, args.compile))
    run = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": args.threads,
        "keeps_memory": kept,
        "torch": torch.__version__,
        "fusednorm": fusednorm.build_info(),
        "results": results,
    }
    (args.out / "norms.json").write_text(json.dumps(run, indent=1) + "\n")
    plot(results, f"fusednorm on {run['cpu']}, torch {run['torch']}", args.out / "norms.png")
    print(markdown(run) if args.markdown else text_table(results))
    if noisy := [r for r in results if is_noisy(r)]:
        note = f"other processes disturbed {len(noisy)} of {len(results)} cases, whose times mean little"
        print(f"warning: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
