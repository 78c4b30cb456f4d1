"""The bars of speed and memory, computed from a stored run: each with what was measured and a verdict.

A bar over many cases is as good as its worst case; ``failing`` lists the cases beyond it, the worst first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shapes import (
    ADD_BAR_SHAPES,
    ADD_TITLES,
    BACKWARD,
    BAR_SHAPES,
    BIG_SHAPE,
    FORWARD,
    FORWARD_BACKWARD,
    FRESH,
    KEPT,
    MODULE_FORWARD,
    MODULE_FORWARD_BACKWARD,
    NORM_TITLES,
    SMALL_SHAPES,
    WIDTH_ROWS,
    Case,
    least_bytes,
    next_power_of_two,
)

Result = dict[str, Any]  # a case's fields, "ms" by candidate, "gb_per_s" of ours

# Processes waiting for their turn 50 times a second: the best sample of threads that wait for one another
# then tells nothing. A judgement, not a measured bound.
NOISY_INTERRUPTIONS = 50.0
NOISE = 1.03  # what two timings of one thing may differ by
FROM_COLUMNS = 96  # narrower rows are bound by what a row costs, not an element
MAX_WIDTH_RATIO = 1.3
# Below this the limit is the cost of a call, for which the bars of small calls are.
LEAST_LIMIT_BYTES = 256 * 1024
SCALING = 1.8
SCALING_ELEMENTS = 2048 * 768
CPP_SMALL_ELEMENTS = 768

PASS, FAIL, NO_DATA, NOT_APPLICABLE = "PASS", "FAIL", "no data", "n/a"


@dataclass(frozen=True)
class Bar:
    """One line of the table of bars."""

    name: str
    bar: str
    measured: str
    verdict: str
    failing: list[str] = field(default_factory=list)


def case_of(result: Result) -> Case:
    """The case of a result, which may come from a file."""
    return Case(**{name: result[name] for name in Case.__dataclass_fields__ if name in result})


def is_noisy(result: Result) -> bool:
    """Whether other processes kept this case from running undisturbed."""
    return float(result["interruptions_per_s"]) > NOISY_INTERRUPTIONS


def ratio(result: Result, other: str) -> float:
    """Our time over another's."""
    return float(result["ms"]["ours"] / result["ms"][other])


def _over_eager(result: Result) -> float:
    return ratio(result, "eager")


def _over_limit(result: Result) -> float:
    return ratio(result, "limit")


def over_best(result: Result, others: Sequence[str] = ("eager", "compile")) -> float:
    """Our time over that of the fastest of the others that were timed."""
    return float(result["ms"]["ours"] / min(result["ms"][o] for o in others if o in result["ms"]))


def worst_of(name: str, at_most: float, found: Iterable[tuple[float, str]], note: str = "") -> Bar:
    """The bar ``every value <= at_most`` over (value, case) pairs."""
    values = sorted(found, reverse=True)
    if not values:
        return Bar(name, f"≤ {at_most:.2f}", "", NO_DATA)
    worst, where = values[0]
    failing = [f"{value:.2f} {case}" for value, case in values if value > at_most]
    measured = f"{worst:.2f} ({where})"
    if failing and len(values) > 1:
        measured += f"; {len(failing)} of {len(values)} beyond, best {values[-1][0]:.2f}"
    return Bar(name, f"≤ {at_most:.2f}", measured + note, FAIL if failing else PASS, failing)


def _label(result: Result) -> str:
    return str(case_of(result)) + ", disturbed" * is_noisy(result)


def _l3_bytes(machine: dict[str, Any]) -> int:
    return machine["l3_bytes"] or 32 << 20


def _plain(results: Iterable[Result]) -> list[Result]:
    """The machine's own instruction set and kept memory."""
    return [r for r in results if not case_of(r).isa and case_of(r).memory == KEPT]


def _pick(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """The results whose fields have one of the values named."""
    return [r for r in results if all(r[key] in values for key, values in wanted.items())]


def _ratios(results: Iterable[Result], value: Callable[[Result], float]) -> list[tuple[float, str]]:
    return [(value(r), _label(r)) for r in results]


def speed_bars(results: Sequence[Result]) -> list[Bar]:
    """Beside the best of eager and compile at the four bar shapes."""
    here = [r for r in _plain(results) if case_of(r).shape in BAR_SHAPES]
    bars = []

    def add(
        norm: str, direction: str, dtypes: Sequence[str], best: float, eager: float | None = None
    ) -> None:
        found = _pick(here, norm=[norm], direction=[direction], dtype=dtypes)
        title = f"{NORM_TITLES[norm]} {direction} {'/'.join(dtypes)}"
        bars.append(worst_of(f"{title}, of best other", best, _ratios(found, over_best)))
        if eager is not None:
            small = [r for r in found if (r["rows"], r["cols"], r["dtype"]) == (256, 768, "fp32")]
            if direction == FORWARD and small:
                found = [r for r in found if r not in small]
                name = f"{title}, of eager, 256x768"
                bars.append(worst_of(name, 0.45, _ratios(small, _over_eager)))
            bars.append(worst_of(f"{title}, of eager", eager, _ratios(found, _over_eager)))

    add("layer_norm", FORWARD, ("fp32",), 0.60)
    add("layer_norm", FORWARD, ("bf16", "fp16"), 0.50)
    add("rms_norm", FORWARD, ("fp32",), 0.60, 0.30)
    add("rms_norm", FORWARD, ("bf16",), 0.50, 0.30)
    add("layer_norm", FORWARD_BACKWARD, ("fp32",), 0.60)
    add("layer_norm", FORWARD_BACKWARD, ("bf16",), 0.45)
    add("rms_norm", FORWARD_BACKWARD, ("fp32", "bf16"), 0.40, 0.15)
    return bars


def limit_bars(results: Sequence[Result], machine: dict[str, Any]) -> list[Bar]:
    """Beside an operation that moves the same bytes, in cache and out of it by the bytes of all tensors."""
    l3 = _l3_bytes(machine)
    plain = [r for r in _plain(results) if "limit" in r["ms"] and r["norm"] in NORM_TITLES]
    tiny = [r for r in plain if r["cols"] < FROM_COLUMNS or least_bytes(case_of(r)) < LEAST_LIMIT_BYTES]
    plain = [r for r in plain if r not in tiny]
    in_cache = [r for r in plain if least_bytes(case_of(r)) <= l3 / 2]
    out_of_cache = [r for r in plain if least_bytes(case_of(r)) > 2 * l3]
    bars = []
    for direction, dtype, where, at_most in (
        (FORWARD, "fp32", "in cache", 2.0),
        (FORWARD, "bf16", "in cache", 3.0),
        (FORWARD, "fp32", "out of cache", 1.25),
        (FORWARD, "bf16", "out of cache", 1.25),
        (BACKWARD, "fp32", "in cache", 1.6),
        (BACKWARD, "bf16", "in cache", 1.6),
        (BACKWARD, "fp32", "out of cache", 1.25),
        (BACKWARD, "bf16", "out of cache", 1.25),
    ):
        found = in_cache if where == "in cache" else out_of_cache
        found = _pick(found, direction=[direction], dtype=[dtype])
        limit = "clone" if direction == FORWARD else "add"
        name = f"{direction} {dtype} {where}, of {limit}"
        bars.append(worst_of(name, at_most, _ratios(found, _over_limit)))

    # Said, so that nothing hides behind the two thresholds.
    name = f"under {LEAST_LIMIT_BYTES >> 10} KiB or {FROM_COLUMNS} columns, of the limit"
    worst = worst_of(name, float("inf"), _ratios(_pick(tiny, direction=[FORWARD, BACKWARD]), _over_limit))
    bars.append(Bar(name, "no bar", worst.measured, NOT_APPLICABLE))

    big = [r for r in results if case_of(r).shape == BIG_SHAPE and case_of(r).memory == FRESH]
    found = _pick(big, direction=[FORWARD], dtype=["fp32", "bf16"])
    bar = worst_of("forward 8192x4096 in fresh memory, of clone", 0.60, _ratios(found, _over_limit))
    if machine["huge_pages"] != "madvise":
        bar = Bar(bar.name, bar.bar, f"huge pages: {machine['huge_pages']}; {bar.measured}", NOT_APPLICABLE)
    return [*bars, bar]


def add_bars(results: Sequence[Result], machine: dict[str, Any]) -> list[Bar]:
    """The residual add beside our own two steps, the best of eager and compile, and two clones."""
    plain, dtypes, bars = _plain(results), ("fp32", "bf16"), []
    here = [r for r in plain if case_of(r).shape in ADD_BAR_SHAPES]
    for norm, title in ADD_TITLES.items():
        forward = _pick(here, norm=[norm], direction=[FORWARD], dtype=dtypes)
        both = _pick(here, norm=[norm], direction=[FORWARD_BACKWARD], dtype=dtypes)
        unfused = _ratios(forward, lambda r: ratio(r, "unfused"))
        bars.append(worst_of(f"{title} forward, of our two steps", 0.60, unfused))
        bars.append(worst_of(f"{title} forward, of best other", 0.50, _ratios(forward, over_best)))
        bars.append(worst_of(f"{title} fwd+bwd, of best other", 0.50, _ratios(both, over_best)))
    big = _pick(plain, norm=ADD_TITLES, direction=[FORWARD], dtype=dtypes)
    big = [r for r in big if least_bytes(case_of(r)) > 2 * _l3_bytes(machine)]
    bars.append(worst_of("add+norm forward out of cache, of two clones", 1.50, _ratios(big, _over_limit)))
    return bars


def small_bars(results: Sequence[Result], cpp: Sequence[Result]) -> list[Bar]:
    """Small calls: what a call costs beside the kernel."""
    here = [r for r in _plain(results) if case_of(r).shape in SMALL_SHAPES]
    bars = []
    for direction, norm, at_most in (
        (MODULE_FORWARD, "layer_norm", 0.65),
        (MODULE_FORWARD, "rms_norm", 0.35),
        (MODULE_FORWARD_BACKWARD, "layer_norm", 0.90),
        (MODULE_FORWARD_BACKWARD, "rms_norm", 0.40),
    ):
        found = _pick(here, direction=[direction], norm=[norm])
        name = f"small calls from Python, {direction}, of nn.{NORM_TITLES[norm]}"
        bars.append(worst_of(name, at_most, _ratios(found, _over_eager)))
    for name, at_most, small in (("up to 1x768", 0.50, True), ("up to 8x4096", 0.65, False)):
        found = [r for r in cpp if (r["rows"] * r["cols"] <= CPP_SMALL_ELEMENTS) == small]
        pairs = [(r["ours_ns"] / r["eager_ns"], f"{r['rows']}x{r['cols']} {r['dtype']}") for r in found]
        bars.append(worst_of(f"small calls from C++ {name}, of at::layer_norm", at_most, pairs))
    return bars


def sweep_bars(results: Sequence[Result]) -> list[Bar]:
    """Nothing slower than eager; and, without a bar, how often ours is the fastest of all."""
    bars = [worst_of("every case of the sweep, of eager", NOISE, _ratios(results, _over_eager))]
    others = ("eager", "compile", "onnxruntime")
    timed = [r for r in results if "onnxruntime" in r["ms"]]
    if timed:
        slower = [(v, c) for v, c in _ratios(timed, lambda r: over_best(r, others)) if v > NOISE]
        name = "cases beside ONNX Runtime where ours is the fastest"
        measured = f"{len(timed) - len(slower)} of {len(timed)}"
        listed = [f"{v:.2f} {c}" for v, c in sorted(slower, reverse=True)]
        bars.append(Bar(name, "no bar", measured, NOT_APPLICABLE, listed))
    return bars


def width_ratios(results: Sequence[Result]) -> dict[Case, float]:
    """Each width's time per element over that of the next power of two."""
    times = {case_of(r): r["ms"]["ours"] for r in _plain(results) if r["rows"] == WIDTH_ROWS}
    ratios = {}
    for case, ms in times.items():
        power = next_power_of_two(case.cols)
        reference = times.get(Case(**(asdict(case) | {"cols": power})))
        if power != case.cols and reference is not None:
            ratios[case] = (ms / case.cols) / (reference / power)
    return ratios


def width_bars(results: Sequence[Result]) -> list[Bar]:
    """No width much dearer by the element than the next power of two."""
    ratios = [(v, case) for case, v in width_ratios(results).items()]
    wide = [(v, str(c)) for v, c in ratios if c.cols >= FROM_COLUMNS]
    narrow = sorted({c.cols for _, c in ratios if c.cols < FROM_COLUMNS})
    per_width = (f"{w}: {max(v for v, c in ratios if c.cols == w):.2f}" for w in narrow)
    note = f"; below {FROM_COLUMNS} columns, {', '.join(per_width)}" if narrow else ""
    return [worst_of("time of an element over that at the next power of two", MAX_WIDTH_RATIO, wide, note)]


def scaling_bars(results: Sequence[Result]) -> list[Bar]:
    """All threads beside one, where the limit itself scales so."""
    plain = {case_of(r): r for r in _plain(results) if r["norm"] in NORM_TITLES}
    pairs = []
    most = max((c.threads for c in plain), default=1)
    for case, one in plain.items():
        more = plain.get(Case(**(asdict(case) | {"threads": most})))
        if case.threads == 1 < most and case.rows * case.cols >= SCALING_ELEMENTS and more is not None:
            gain = {name: one["ms"][name] / more["ms"][name] for name in ("ours", "limit")}
            pairs.append((gain["ours"], gain["limit"], case, is_noisy(one) or is_noisy(more)))
    name, bar = f"{most} threads over 1, 2048x768 and up", f"≥ {SCALING:.2f} where the limit does"
    if not pairs:
        return [Bar(name, bar, "", NO_DATA)]
    held = [p for p in pairs if p[1] >= SCALING]
    limits = f"the limit scales by {min(p[1] for p in pairs):.2f} to {max(p[1] for p in pairs):.2f}"
    if not held:
        gains = f"ours by {min(p[0] for p in pairs):.2f} to {max(p[0] for p in pairs):.2f}"
        return [Bar(name, bar, f"{limits}, {gains}", NOT_APPLICABLE)]

    def text(p: tuple[float, float, Case, bool]) -> str:
        return f"{p[0]:.2f}, limit {p[1]:.2f} ({p[2]}{', disturbed' * p[3]})"

    held.sort(key=lambda p: p[0])
    failing = [text(p) for p in held if p[0] < SCALING]
    measured = f"{text(held[0])}; {len(failing)} of {len(held)} below; over all {len(pairs)} {limits}"
    return [Bar(name, bar, measured, FAIL if failing else PASS, failing)]


def memory_bars(memory: Sequence[Result]) -> list[Bar]:
    """Peak extra memory of forward and backward."""
    found = [(m["peak"] / m["bound"], m["case"]) for m in memory]
    workspace = max((m["workspace"] for m in memory), default=0) / 2**20
    note = f"; workspace allowed: at most {workspace:.1f} MiB here" if memory else ""
    name = "peak memory of fwd+bwd over outputs + statistics + workspace"
    return [worst_of(name, 1.0, found, note)]


def all_bars(run: dict[str, Any]) -> list[Bar]:
    """Every bar, from a run as stored."""
    results, machine = run["results"], run["machine"]
    return [
        *speed_bars(results),
        *limit_bars(results, machine),
        *add_bars(results, machine),
        *small_bars(results, run.get("small_calls_cpp", [])),
        *sweep_bars(results),
        *width_bars(results),
        *scaling_bars(results),
        *memory_bars(run.get("memory", [])),
    ]


def bars_markdown(bars: Sequence[Bar], listed: int = 0) -> str:
    """The table, and under it up to so many of each bar's failing cases."""
    lines = ["| bar | at most | measured | |", "|---|---|---|---|"]
    lines += [f"| {b.name} | {b.bar} | {b.measured} | {b.verdict} |" for b in bars]
    verdicts = [b.verdict for b in bars]
    lines += ["", f"{verdicts.count(PASS)} PASS, {verdicts.count(FAIL)} FAIL of {len(bars)} bars"]
    for b in bars:
        if listed and b.failing:
            lines += ["", f"{b.name} ({b.bar}):", *[f"  {case}" for case in b.failing[:listed]]]
            lines += [f"  ... and {len(b.failing) - listed} more"] * (len(b.failing) > listed)
    return "\n".join(lines)
