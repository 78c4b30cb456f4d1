"""Pictures of a run, one message in each: how much faster than the best other, how near to the limit.

    python benchmarks/plots.py      draws pictures/speed.png from the table of times in README.md

All are 1,200 pixels wide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from bars import Result, case_of, over_best, ratio
from shapes import BACKWARD, DTYPES, FORWARD, FORWARD_BACKWARD, KEPT, NORM_TITLES, Case

matplotlib.use("Agg")

DPI, WIDTH = 100, 12.0  # inches
ALL_OTHERS = ("eager", "compile", "onnxruntime")
NAMES = {FORWARD: "forward", BACKWARD: "backward", FORWARD_BACKWARD: "forward_backward"}
HERE = Path(__file__).resolve().parent


def _shown(results: Sequence[Result], direction: str) -> dict[Case, Result]:
    """What a picture shows: the norms alone, on one thread, by the machine's own kernels, in kept memory."""
    found = {case_of(r): r for r in results}
    threads = min((c.threads for c in found), default=1)
    found = {
        c: r
        for c, r in found.items()
        if c.norm in NORM_TITLES and c.direction == direction and not c.isa and c.threads == threads
    }
    kept = {c: r for c, r in found.items() if c.memory == KEPT}
    return kept or found


def _picture(
    by_case: dict[Case, Result], value: Callable[[Result], float], label: str, title: str, path: Path
) -> None:
    """A panel for each norm: shapes by their elements, a line for each dtype."""
    norms = [n for n in NORM_TITLES if any(c.norm == n for c in by_case)]
    shapes = sorted({c.shape for c in by_case}, key=lambda s: (s[0] * s[1], s[1]))
    figure, panels = plt.subplots(
        1, len(norms), figsize=(WIDTH, 5.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, norm in zip(panels[0], norms, strict=True):
        for i, dtype in enumerate(DTYPES):
            of_line = {c.shape: r for c, r in by_case.items() if (c.norm, c.dtype) == (norm, dtype)}
            points = [(k, value(of_line[shape])) for k, shape in enumerate(shapes) if shape in of_line]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{i}", marker="o", label=dtype)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(NORM_TITLES[norm])
        axes.grid(alpha=0.3)
        axes.set_xticks(range(len(shapes)), [f"{r}x{c}" for r, c in shapes], rotation=90)
    panels[0][0].set_ylabel(label)
    panels[0][0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def draw(results: Sequence[Result], title: str, folder: Path) -> list[str]:
    """Writes the pictures of what was measured; their names."""
    timed = [r for r in results if "limit" in r["ms"]]
    written = []

    def add(name: str, direction: str, value: Callable[[Result], float], label: str, what: str) -> None:
        by_case = _shown(timed, direction)
        if by_case:
            threads = next(iter(by_case)).threads
            where = f"{title}, {threads} thread{'s' if threads > 1 else ''}"
            file = f"{name}_{NAMES[direction]}.png"
            _picture(by_case, value, label, f"{what}, {direction}\n{where}", folder / file)
            written.append(file)

    for direction in (FORWARD, FORWARD_BACKWARD):
        add(
            "speedup",
            direction,
            lambda r: 1 / over_best(r, ALL_OTHERS),
            "times as fast (more is better)",
            "How many times as fast as the best of eager, compile and ONNX Runtime",
        )
    for direction in (FORWARD, BACKWARD):
        add(
            "limit",
            direction,
            lambda r: ratio(r, "limit"),
            "time over the limit's (1: no way to be faster)",
            "Time over that of moving the same bytes",
        )
    return written


Row = tuple[str, str, float]  # shape, dtype, of eager


def rows_of(page: str, norm: str, column: str) -> list[Row]:
    """A column of a norm's table of times, as stands in README.md."""
    (table,) = re.findall(rf"^\| {norm} \| dtype \|.*\n(?:\|.*\n)+", page, re.M)
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    at = lines[0].index(column)
    found = [(line, re.search(r"\(([\d.]+) of eager", line[at])) for line in lines[2:]]
    return [(line[0], line[1], float(match[1])) for line, match in found if match]


def draw_speed(page: str, path: Path, column: str = "fwd+bwd 1 thread") -> None:
    """Bars of our time over eager's: what a reader of the first page wants to know."""
    figure, panels = plt.subplots(
        1, len(NORM_TITLES), figsize=(WIDTH, 4.6), sharey=True, layout="constrained"
    )
    for axes, norm in zip(panels, NORM_TITLES.values(), strict=True):
        rows = rows_of(page, norm, column)
        shapes = list(dict.fromkeys(shape for shape, _, _ in rows))
        for offset, dtype in ((-0.2, "fp32"), (0.2, "bf16")):
            values = {shape: value for shape, of, value in rows if of == dtype}
            places = [i + offset for i, shape in enumerate(shapes) if shape in values]
            bars = axes.bar(places, [values[s] for s in shapes if s in values], 0.38, label=dtype)
            axes.bar_label(bars, fmt="%.2f", fontsize=10)
        axes.axhline(1, color="black", linewidth=1.5)
        axes.set_xticks(range(len(shapes)), shapes, fontsize=11)
        axes.set_title(norm, fontsize=13)
        axes.set_ylim(0, 1.12)
        axes.text(len(shapes) - 0.5, 1.02, "torch eager = 1", ha="right", fontsize=11)
    panels[0].set_ylabel("our time / torch's (less is better)", fontsize=11)
    panels[0].legend(fontsize=11, loc="upper left", bbox_to_anchor=(0.0, 0.9))
    machine = re.findall(r"^([^|\n]+)\n<!-- end norms -->", page, re.M)[0]
    title = f"fusednorm beside torch: forward and backward on the CPU, one thread\n{machine}"
    figure.suptitle(title, fontsize=13)
    figure.supxlabel("rows x columns", fontsize=11)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


if __name__ == "__main__":
    draw_speed((HERE / "README.md").read_text(encoding="utf-8"), HERE / "pictures/speed.png")
