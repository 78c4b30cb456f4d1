"""What :class:`fusednorm.NormMonitor` saw, as a table, a picture, JSON and scalars for TensorBoard."""

import importlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusednorm.training.statistics import ColumnStatistics, Sample

__all__ = ["NormReport", "Outlier", "plot", "table", "to_json", "write_scalars"]

_LISTED = 8  # outlier dimensions that the table names of a norm


@dataclass(frozen=True)
class Outlier:
    """A dimension whose deviation is far from the others'; ``ratio`` is to the median of all dimensions."""

    __module__ = "fusednorm.training"  # what pickles call it

    dim: int
    std: float
    ratio: float


@dataclass(frozen=True)
class NormReport:
    """What was seen of one norm.

    ``rows``, ``mean``, ``std``, ``largest`` and ``nonfinite`` have an element for each dimension, on the CPU,
    over all observed steps: ``rows`` the finite values, ``nonfinite`` the others; where there was no finite
    value, ``mean``, ``std`` and ``largest`` are NaN. ``series`` has numbers by
    observed step: the ``step``, the ``largest`` magnitude, ``weight_norm``, ``weight_grad_norm``,
    ``input_grad_norm`` (NaN where there was none), ``nonfinite_input``, ``nonfinite_grad``.
    """

    __module__ = "fusednorm.training"  # what pickles call it

    name: str
    kind: str
    rows: Tensor
    mean: Tensor
    std: Tensor
    largest: Tensor
    nonfinite: Tensor
    outliers: list[Outlier]
    series: dict[str, list[float]]

    @classmethod
    def make(
        cls,
        name: str,
        kind: str,
        columns: ColumnStatistics | None,
        series: dict[str, list[float]],
        outlier_ratio: float,
    ) -> "NormReport":
        if columns is None:
            columns = ColumnStatistics(0, torch.device("cpu"))
        rows, std, nonfinite = columns.count.cpu(), columns.std().cpu(), columns.nonfinite.cpu()
        mean, largest = (t.cpu().where(rows > 0, math.nan) for t in (columns.mean, columns.largest))
        outliers = _outliers(std, outlier_ratio)
        return cls(name, kind, rows, mean, std, largest, nonfinite, outliers, series)

    @property
    def seen(self) -> bool:
        """Whether the norm ran in an observed step at all."""
        return bool(self.series["step"])

    def last(self, key: str) -> float:
        """A series' number of the step observed last, NaN where there is none."""
        return self.series[key][-1] if self.series[key] else math.nan

    def first_nonfinite(self, where: str) -> int | None:
        """The first observed step with NaN or infinity in the ``"input"`` or the ``"grad"`` of the input."""
        counts = zip(self.series["step"], self.series[f"nonfinite_{where}"], strict=True)
        return next((int(step) for step, count in counts if count > 0), None)


def _outliers(std: Tensor, ratio: float) -> list[Outlier]:
    """The widest first. A deviation of 0 beside others is an outlier, and so is any beside a median of 0."""
    if len(std) == 0:
        return []
    median = std.nanmedian()
    far = ((std >= ratio * median) | (std * ratio <= median)) & (std != median)
    found = [Outlier(dim, float(std[dim]), float(std[dim] / median)) for dim in far.nonzero()[:, 0].tolist()]
    return sorted(found, key=lambda outlier: -outlier.std)


def _first_nonfinite(reports: list[NormReport], where: str) -> tuple[int, NormReport] | None:
    """The earliest step, and in it the norm that values reach first: gradients come from the other end."""
    found = [(report.first_nonfinite(where), report) for report in reports]
    steps = [step for step, _ in found if step is not None]
    if not steps:
        return None
    in_order = found if where == "input" else reversed(found)
    return next((step, report) for step, report in in_order if step is not None and step == min(steps))


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _row(report: NormReport) -> list[str]:
    if not report.seen:
        return [report.name, report.kind, "did not run in an observed step"]
    seen = report.rows > 0
    std, largest = report.std[seen], report.largest[seen]
    input = [float(std.median()), float(std.max()), float(largest.max())] if seen.any() else [math.nan] * 3
    gradients = [report.last(key) for key in ("weight_norm", "weight_grad_norm", "input_grad_norm")]
    bad = int(sum(report.series["nonfinite_input"]) + sum(report.series["nonfinite_grad"]))
    numbers = [_short(value) for value in (*input, *gradients)]
    outliers = str(len(report.outliers))
    return [report.name, report.kind, str(len(report.std)), *numbers[:3], outliers, *numbers[3:], str(bad)]


def table(reports: list[NormReport], steps: int, every: int) -> str:
    """The report as aligned text."""
    head = ["norm", "kind", "dims", "median std", "widest std", "largest", "outliers",
            "|weight|", "|grad weight|", "|grad input|", "not finite"]  # fmt: skip
    rows = [head, *map(_row, reports)]
    whole = [row for row in rows if len(row) == len(head)]
    widths = [max(len(row[i]) for row in (rows if i < 2 else whole)) for i in range(len(head))]
    lines = []
    for row in rows:
        words = [row[i].ljust(widths[i]) for i in range(2)]
        rest = row[2:] if len(row) < len(head) else [row[i].rjust(widths[i]) for i in range(2, len(head))]
        lines.append("  ".join(words + rest).rstrip())
    observed = max(len(report.series["step"]) for report in reports)
    lines.append(
        f"{observed} of {steps} steps observed (every {every}); gradients and weights: the last of them"
    )
    for report in reports:
        if report.outliers:
            named = ", ".join(f"{o.dim} ({_short(o.ratio)}x)" for o in report.outliers[:_LISTED])
            more = len(report.outliers) - _LISTED
            lines.append(
                f"outlier dimensions of {report.name}: {named}" + (f" and {more} more" if more > 0 else "")
            )
    for where, what in ("input", "the input"), ("grad", "the input's gradient"):
        first = _first_nonfinite(reports, where)
        if first is not None:
            lines.append(f"NaN or infinity first seen in {what} of {first[1].name}, at step {first[0]}")
    return "\n".join(lines)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _entry(report: NormReport) -> dict[str, Any]:
    def numbers(values: Iterable[float]) -> list[float | None]:
        return [_number(value) for value in values]

    whole = ("step", "nonfinite_input", "nonfinite_grad")
    return {
        "name": report.name,
        "kind": report.kind,
        "rows": [int(count) for count in report.rows.tolist()],
        "mean": numbers(report.mean.tolist()),
        "std": numbers(report.std.tolist()),
        "largest": numbers(report.largest.tolist()),
        "nonfinite": report.nonfinite.tolist(),
        "outliers": [{"dim": o.dim, "std": o.std, "ratio": _number(o.ratio)} for o in report.outliers],
        "first_nonfinite_input": report.first_nonfinite("input"),
        "first_nonfinite_grad": report.first_nonfinite("grad"),
        "series": {
            key: [int(value) for value in values] if key in whole else numbers(values)
            for key, values in report.series.items()
        },
    }


def to_json(reports: list[NormReport], steps: int, every: int, path: str | PathLike[str]) -> None:
    """Writes all of the report; first_nonfinite names the earliest step, and the norm it came to first."""
    first = {where: _first_nonfinite(reports, where) for where in ("input", "grad")}
    content = {
        "every": every,
        "steps": steps,
        "first_nonfinite": {
            where: None if found is None else {"step": found[0], "norm": found[1].name}
            for where, found in first.items()
        },
        "norms": [_entry(report) for report in reports],
    }
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_scalars(writer: Any, name: str, sample: Sample, outlier_ratio: float) -> None:
    """One observed step's own numbers, under ``norms/<name>/``; what there is no number for is left out."""
    numbers: dict[str, float] = dict(sample.numbers())
    step = int(numbers.pop("step"))
    if sample.columns is not None:
        std = sample.columns.std().cpu()
        numbers["median_std"] = float(std.nanmedian())
        numbers["outliers"] = len(_outliers(std, outlier_ratio))
    for key, value in numbers.items():
        if not math.isnan(value):
            writer.add_scalar(f"norms/{name}/{key}", value, step)


def plot(reports: list[NormReport], path: str | PathLike[str]) -> None:
    """Deviations by layer and dimension beside gradient norms by depth."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        colors: Any = importlib.import_module("matplotlib.colors")
    except ImportError as error:
        raise ImportError(
            "fusednorm.NormMonitor.plot: needs matplotlib, which cannot be imported: pip install matplotlib"
        ) from error
    reports = [report for report in reports if report.seen]
    if not reports:
        raise RuntimeError("fusednorm.NormMonitor.plot: no step was observed yet")
    names, depths = [report.name for report in reports], range(len(reports))
    std = torch.full((len(reports), max(len(report.std) for report in reports)), math.nan)
    for row, report in zip(std, reports, strict=True):
        row[: len(report.std)] = report.std
    positive = std[std > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 1.0)

    figure = figures.Figure(figsize=(13, 1.8 + max(3.0, 0.28 * len(reports))), layout="constrained")
    heat, gradients = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    drawn = heat.imshow(
        std.clamp_min(low).numpy(),  # a deviation of 0 has no logarithm: it is drawn as the smallest
        aspect="auto",
        interpolation="nearest",
        norm=colors.LogNorm(low, max(high, 1.001 * low)),
    )
    heat.set(title="standard deviation of the norm's input", xlabel="dimension", yticks=depths)
    heat.set_yticklabels(names)
    figure.colorbar(drawn, ax=heat)
    steps = sorted({step for report in reports for step in report.series["step"]})
    for step in [steps[i] for i in sorted({0, len(steps) // 2, len(steps) - 1})]:
        found = [dict(zip(r.series["step"], r.series["input_grad_norm"], strict=True)) for r in reports]
        norms = [value if value > 0 else math.nan for value in (f.get(step, math.nan) for f in found)]
        gradients.plot(norms, depths, marker="o", markersize=4, label=f"step {int(step)}")
    gradients.set(title="norm of the loss's gradient at the norm's input", xlabel="gradient norm (log)")
    gradients.set_xscale("log")
    gradients.tick_params(axis="x", which="both", labelsize=8, labelrotation=45)
    gradients.grid(alpha=0.3)
    gradients.legend()
    figure.savefig(path, dpi=110)
