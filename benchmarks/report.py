"""A run as text: the table for a terminal and the tables of times in README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bars import Result, case_of, is_noisy, over_best, ratio
from shapes import ALL_TITLES, BAR_SHAPES, BF16_ON_FP32, BIG_SHAPE, FORWARD, FORWARD_BACKWARD, KEPT, Case


def text_table(results: Sequence[Result]) -> str:
    """A line for each case, and a note on those that eager wins."""
    names = ("ours", "unfused", "eager", "compile", "onnxruntime", "limit")
    names = tuple(n for n in names if n != "unfused" or any(n in r["ms"] for r in results))
    head = f"{'case':<62}" + "".join(f"{n + ' ms':>15}" for n in names)
    lines = [head + f"{'of best other':>15}{'of limit':>10}{'GB/s':>8}"]
    for r in results:
        times = "".join(f"{r['ms'][n]:>15.4f}" if n in r["ms"] else " " * 15 for n in names)
        limit = f"{ratio(r, 'limit'):>10.2f}" if "limit" in r["ms"] else " " * 10
        line = f"{case_of(r)!s:<62}{times}{over_best(r):>15.2f}{limit}{r['gb_per_s']:>8.1f}"
        lines.append(line + "  disturbed" * is_noisy(r))
    slower = [r for r in results if ratio(r, "eager") > 1.0]
    lines.append(f"\n{len(slower)} of {len(results)} cases take over 1.00 of eager's time")
    lines += [f"  {case_of(r)}: {ratio(r, 'eager'):.3f}{', disturbed' * is_noisy(r)}" for r in slower]
    return "\n".join(lines)


def _cell(result: Result) -> str:
    steps = f", {ratio(result, 'unfused'):.2f} of two steps" if "unfused" in result["ms"] else ""
    return f"{result['ms']['ours']:.3f} ms ({ratio(result, 'eager'):.2f} of eager{steps})"


def markdown(run: dict[str, Any]) -> str:
    """The tables of times in README.md: a row for each shape and dtype, a column for each direction.

    Of the sweep's shapes those of the bars and the largest; of another choice of shapes, all. An empty cell
    is a case that was not measured.
    """
    by_case = {case_of(r): r for r in run["results"]}
    # A run of one kind of memory alone shows that; a whole sweep has both, and shows what was kept.
    memories = {c.memory for c in by_case}
    memory = KEPT if KEPT in memories or not memories else memories.pop()
    directions = (FORWARD, FORWARD_BACKWARD)
    kept = [c for c in by_case if c.memory == memory and not c.isa and c.direction in directions]
    dtypes = ("fp32", "bf16", BF16_ON_FP32)
    usual = [c for c in kept if c.shape in (*BAR_SHAPES, BIG_SHAPE) and c.dtype in dtypes]
    kept = usual or kept
    threads = sorted({c.threads for c in kept})
    columns = [(d, t) for d in directions for t in threads]
    heads = [f"{d} {t} thread{'s' if t > 1 else ''}" for d, t in columns]
    lines = []
    for norm in dict.fromkeys(c.norm for c in kept):
        lines += [f"| {ALL_TITLES[norm]} | dtype | " + " | ".join(heads) + " |"]
        lines += ["|---|---|" + "---:|" * len(columns)]
        keys = dict.fromkeys((c.rows, c.cols, c.dtype) for c in kept if c.norm == norm)
        for rows, cols, dtype in sorted(keys, key=lambda key: key[0] * key[1]):
            cells = []
            for d, t in columns:
                r = by_case.get(Case(norm, rows, cols, dtype, d, t, "", memory))
                cells.append(_cell(r) if r else "")
            lines.append(f"| {rows}x{cols} | {dtype} | " + " | ".join(cells) + " |")
        lines.append("")
    what = "freed memory kept" if memory == KEPT else "the default malloc"
    return "\n".join([*lines, f"{run['cpu']}, torch {run['torch']}, {what}, {run['date'][:10]}."])
