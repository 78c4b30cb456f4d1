"""Two pictures of a run: time relative to the limit by size, and speed-up over the best other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from bars import Result, case_of, over_best, ratio
from shapes import DIRECTIONS, DTYPES, KEPT, NORM_TITLES, Case

matplotlib.use("Agg")

ALL_OTHERS = ("eager", "compile", "onnxruntime")


def _shown(results: Sequence[Result]) -> dict[Case, Result]:
    """What both pictures show: the norms alone, by the machine's own kernels, in memory that was kept."""
    found = {case_of(r): r for r in results}
    found = {
        c: r for c, r in found.items() if c.norm in NORM_TITLES and c.direction in DIRECTIONS and not c.isa
    }
    kept = {c: r for c, r in found.items() if c.memory == KEPT}
    return kept or found


def _panels(
    results: Sequence[Result], value: Callable[[Result], float], label: str, title: str, path: Path
) -> None:
    """A panel for each norm and direction: shapes by their elements, a line for dtype and threads."""
    by_case = _shown(results)
    norms = [n for n in NORM_TITLES if any(c.norm == n for c in by_case)]
    directions = [d for d in DIRECTIONS if any(c.direction == d for c in by_case)]
    if not norms:
        return
    shapes = sorted({c.shape for c in by_case}, key=lambda s: (s[0] * s[1], s[1]))
    series = sorted({(c.dtype, c.threads) for c in by_case}, key=lambda s: (list(DTYPES).index(s[0]), s[1]))
    figure, panels = plt.subplots(
        len(norms),
        len(directions),
        figsize=(max(6.0, 0.33 * len(shapes) + 1.2) * len(directions), 4.6 * len(norms)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (norm, direction) in zip(panels.flat, [(n, d) for n in norms for d in directions], strict=True):
        for dtype, threads in series:
            points = [
                (i, value(r))
                for i, shape in enumerate(shapes)
                if (r := by_case.get(_key(by_case, norm, shape, dtype, direction, threads)))
            ]
            if points:
                axes.plot(
                    [p[0] for p in points],
                    [p[1] for p in points],
                    color=f"C{list(DTYPES).index(dtype)}",
                    marker="o" if threads == 1 else "s",
                    linestyle="-" if threads == 1 else "--",
                    markersize=4,
                    linewidth=1,
                    label=f"{dtype}, {threads} thread{'s' if threads > 1 else ''}",
                )
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{NORM_TITLES[norm]} {direction}")
        axes.grid(alpha=0.3)
        axes.set_xticks(range(len(shapes)), [f"{r}x{c}" for r, c in shapes], rotation=90, fontsize="small")
    for row in panels:
        row[0].set_ylabel(label)
    panels.flat[0].legend(fontsize="small", ncols=2)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _key(
    by_case: dict[Case, Result], norm: str, shape: tuple[int, int], dtype: str, direction: str, threads: int
) -> Case:
    memory = next(iter(by_case)).memory
    return Case(norm, *shape, dtype, direction, threads, "", memory)


def draw(results: Sequence[Result], title: str, folder: Path) -> list[str]:
    """Writes both pictures; their names."""
    timed = [r for r in results if "limit" in r["ms"]]
    _panels(
        timed,
        lambda r: ratio(r, "limit"),
        "time / limit",
        f"Time over the limit's: {title}",
        folder / "limit.png",
    )
    _panels(
        timed,
        lambda r: 1 / over_best(r, ALL_OTHERS),
        "speed-up over the best other",
        f"Speed-up over the fastest of eager, compile and ONNX Runtime: {title}",
        folder / "speedup.png",
    )
    return ["limit.png", "speedup.png"]
