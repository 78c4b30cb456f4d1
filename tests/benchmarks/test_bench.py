"""The benchmark: the bars' arithmetic on made-up runs, what the filter picks, and one tiny case measured."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bars  # noqa: E402  (the benchmarks are programs, no package)
import candidates  # noqa: E402
import options  # noqa: E402
from shapes import ADD_BAR_SHAPES, BAR_SHAPES, FRESH, Case, full_sweep, least_bytes, quick_sweep  # noqa: E402

MACHINE = {"l3_bytes": 32 << 20, "huge_pages": "madvise"}


def _result(case: Case, interruptions: float = 0.0, **ms: float) -> dict[str, Any]:
    return asdict(case) | {"ms": ms, "gb_per_s": 1.0, "interruptions_per_s": interruptions}


def _bar(found: list[bars.Bar], name: str) -> bars.Bar:
    return next(bar for bar in found if name in bar.name)


def _bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/bench_norms.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_best_other_is_the_faster_of_eager_and_compile() -> None:
    results = [
        _result(Case("layer_norm", *shape, "fp32", "forward", 1), ours=5, eager=10) for shape in BAR_SHAPES
    ]
    bar = _bar(bars.speed_bars(results), "LayerNorm forward fp32")
    assert bar.verdict == bars.PASS and bar.measured.startswith("0.50")
    results[2]["ms"] |= {"compile": 8.0, "onnxruntime": 1.0}  # ONNX Runtime is beside the bars
    bar = _bar(bars.speed_bars(results), "LayerNorm forward fp32")
    assert bar.verdict == bars.FAIL
    assert bar.failing == ["0.62 LayerNorm 512x4096 fp32 forward, 1 thread"]
    assert "1 of 4 beyond, best 0.50" in bar.measured
    assert _bar(bars.speed_bars(results), "RMSNorm fwd+bwd").verdict == bars.NO_DATA


def test_rms_norm_has_a_bar_of_its_own_at_the_smallest_shape() -> None:
    results = [_result(Case("rms_norm", *s, "fp32", "forward", 1), ours=4, eager=10) for s in BAR_SHAPES[:2]]
    found = bars.speed_bars(results)
    assert _bar(found, "RMSNorm forward fp32, of eager, 256x768").verdict == bars.PASS  # 0.40 of 0.45
    others = next(b for b in found if b.name == "RMSNorm forward fp32, of eager")
    assert others.failing == ["0.40 RMSNorm 2048x768 fp32 forward, 1 thread"]  # of 0.30


def test_bytes() -> None:
    matrix, row = 2048 * 768 * 4, 768 * 4
    case = Case("layer_norm", 2048, 768, "fp32", "forward", 1)
    assert least_bytes(case) == 2 * matrix + 2 * row
    backward = Case("layer_norm", 2048, 768, "fp32", "backward", 1)
    assert least_bytes(backward) == 3 * matrix + 3 * row
    assert least_bytes(Case("layer_norm", 2048, 768, "fp32", "fwd+bwd", 1)) == 5 * matrix + 5 * row


def test_bytes_of_the_add() -> None:
    """Forward: x and residual in, output and sum out. Backward: three in, one out, or two of two dtypes."""
    matrix, row = 2048 * 768 * 4, 768 * 4
    assert least_bytes(Case("add_layer_norm", 2048, 768, "fp32", "forward", 1)) == 4 * matrix + 2 * row
    assert least_bytes(Case("add_rms_norm", 2048, 768, "fp32", "backward", 1)) == 4 * matrix + 2 * row
    mixed = Case("add_rms_norm", 2048, 768, "bf16+fp32", "forward", 1)
    assert least_bytes(mixed) == 2 * matrix + 2 * (matrix // 2) + row // 2
    mixed = Case("add_rms_norm", 2048, 768, "bf16+fp32", "backward", 1)
    assert least_bytes(mixed) == 3 * matrix + 2 * (matrix // 2) + 2 * (row // 2)


@pytest.mark.parametrize(
    "case",
    [
        Case("layer_norm", 96, 512, "fp32", "forward", 1),
        Case("layer_norm", 96, 512, "bf16", "fwd+bwd", 1),
        Case("add_layer_norm", 96, 512, "fp32", "forward", 1),
        Case("add_rms_norm", 96, 512, "bf16", "fwd+bwd", 1),
        Case("add_rms_norm", 96, 512, "bf16+fp32", "backward", 1),
        Case("add_rms_norm", 96, 512, "bf16+fp32", "fwd+bwd", 1),
    ],
    ids=str,
)
def test_the_limit_moves_the_bytes(case: Case) -> None:
    """What the limit's operations read and write, but for the parameters' few bytes."""
    moved: list[int] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            moved.extend(t.nbytes for t in (*args, output) if isinstance(t, torch.Tensor))
            return output

    run = candidates.limit_run(case, candidates.make_inputs(case.norm, *case.shape, *case.dtypes))
    with Counter():
        run()
    assert sum(moved) == least_bytes(replace(case, rows=2 * case.rows)) - least_bytes(case)


@pytest.mark.parametrize("direction", ["forward", "backward", "fwd+bwd"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16+fp32"])
@pytest.mark.parametrize("norm", ["add_layer_norm", "add_rms_norm"])
def test_candidates_of_the_add(
    norm: str, dtype: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All give output and sum, or the same gradients; a wrong one is found before it is timed."""
    case = Case(norm, 70, 96, dtype, direction, 1)
    inputs = candidates.make_inputs(norm, *case.shape, *case.dtypes)
    with torch.set_grad_enabled(case.grad):
        runs = candidates.candidates(case, inputs, compiled=False)
        found = candidates.check(case, inputs, runs)
        assert {"ours", "unfused", "eager", "limit"} <= set(runs)
        if case.grad:
            ours, unfused, eager = (runs[name]() for name in ("ours", "unfused", "eager"))
            assert [g.dtype for g in ours] == [
                case.dtypes[0],
                case.dtypes[1],
                *[case.dtypes[0]] * (len(ours) - 2),
            ]
            for others in (unfused, eager):
                for g, other in zip(ours, others, strict=True):
                    torch.testing.assert_close(g, other, rtol=0.02, atol=0.02 * float(g.abs().max()))
        else:
            assert set(found) == set(runs) - {"limit"}
        right = getattr(fusednorm.functional, norm)

        def wrong_sum(*arguments: Any) -> Any:
            output, total = right(*arguments)
            return output, total * 1.5

        def wrong_gradient(x: Tensor, residual: Tensor, *arguments: Any) -> Any:
            output, total = right(x, residual, *arguments)
            return output, total + (residual - residual.detach())

        monkeypatch.setattr(fusednorm.functional, norm, wrong_sum)
        with pytest.raises(RuntimeError, match="the sum is off"):
            candidates.check(case, inputs, runs)
        if case.backward:
            monkeypatch.setattr(fusednorm.functional, norm, wrong_gradient)
            with pytest.raises(RuntimeError, match="gradient of the residual is off"):
                candidates.check(case, inputs, runs)


@pytest.mark.parametrize(
    ("shape", "where"),
    [((2048, 768), "in cache"), ((8192, 4096), "out of cache"), ((512, 4096), None), ((4096, 33), None)],
)
def test_limit_by_bytes(shape: tuple[int, int], where: str | None) -> None:
    """12.6 MB are within half of 32 MiB, 268 MB beyond twice, 16.8 MB neither; 33 columns are too narrow."""
    results = [_result(Case("layer_norm", *shape, "fp32", "forward", 1), ours=15, limit=10)]
    found = {b.name: b for b in bars.limit_bars(results, MACHINE)}
    verdicts = {w: found[f"forward fp32 {w}, of clone"].verdict for w in ("in cache", "out of cache")}
    passes = {"in cache": bars.PASS, "out of cache": bars.FAIL}  # 1.5 of 2.0, and of 1.25
    assert verdicts == {w: passes[w] if w == where else bars.NO_DATA for w in passes}
    narrow = _bar(list(found.values()), "columns, of the limit")
    assert narrow.measured.startswith("1.50") == (shape[1] == 33)


def test_fresh_memory_needs_huge_pages_on_request() -> None:
    results = [_result(Case("rms_norm", 8192, 4096, "bf16", "forward", 1, memory=FRESH), ours=7, limit=10)]
    assert bars.limit_bars(results, MACHINE)[-1].verdict == bars.FAIL
    assert bars.limit_bars(results, MACHINE | {"huge_pages": "always"})[-1].verdict == bars.NOT_APPLICABLE


def test_widths_go_by_the_element() -> None:
    def at(cols: int, ms: float) -> dict[str, Any]:
        return _result(Case("layer_norm", 4096, cols, "fp32", "forward", 1), ours=ms)

    results = [at(257, 2.57), at(512, 5.12), at(1025, 14.35), at(2048, 20.48), at(33, 3.3), at(64, 0.64)]
    (bar,) = bars.width_bars(results)
    assert bar.verdict == bars.FAIL and len(bar.failing) == 1 and bar.failing[0].startswith("1.40")
    assert "33: 10.00" in bar.measured  # too narrow for the bar, but said


def test_scaling_counts_where_the_limit_scales() -> None:
    def pair(limit: float) -> list[dict[str, Any]]:
        one, two = (Case("layer_norm", 2048, 768, "fp32", "forward", t) for t in (1, 2))
        return [_result(one, ours=10, limit=10), _result(two, ours=6, limit=10 / limit)]

    (bar,) = bars.scaling_bars(pair(1.9))
    assert bar.verdict == bars.FAIL and bar.failing[0].startswith("1.67, limit 1.90")
    (bar,) = bars.scaling_bars(pair(1.5))
    assert bar.verdict == bars.NOT_APPLICABLE and "limit scales by 1.50" in bar.measured


def test_bars_of_the_add() -> None:
    """At two shapes, in fp32 and bf16; the limit where the bytes are beyond twice the cache."""
    cases = [Case("add_rms_norm", *s, "bf16", "forward", 1) for s in (*ADD_BAR_SHAPES, (8192, 4096))]
    results = [_result(c, ours=5, unfused=10, eager=20, compile=12, limit=4) for c in cases]
    results.append(
        _result(Case("add_rms_norm", 512, 4096, "bf16+fp32", "forward", 1), ours=9, unfused=10, eager=10)
    )
    found = {b.name: b for b in bars.add_bars(results, MACHINE)}
    assert len(found) == 7
    assert found["add+RMSNorm forward, of our two steps"].verdict == bars.PASS
    assert found["add+RMSNorm forward, of best other"].measured.startswith("0.42")
    assert found["add+RMSNorm fwd+bwd, of best other"].verdict == bars.NO_DATA
    assert found["add+LayerNorm forward, of our two steps"].verdict == bars.NO_DATA
    limit = found["add+norm forward out of cache, of two clones"]
    assert limit.verdict == bars.PASS and "8192x4096" in limit.measured
    results[1]["ms"] |= {"ours": 7, "limit": 1}
    found = {b.name: b for b in bars.add_bars(results, MACHINE)}
    failing = ["0.70 add+RMSNorm 512x4096 bf16 forward, 1 thread"]
    assert found["add+RMSNorm forward, of our two steps"].failing == failing
    assert found["add+norm forward out of cache, of two clones"].verdict == bars.PASS  # 17 MB are in no bar


def test_small_calls_and_memory() -> None:
    cpp = [{"rows": 1, "cols": 768, "dtype": "fp32", "ours_ns": 400, "eager_ns": 1000}]
    cpp += [{"rows": 8, "cols": 768, "dtype": "fp32", "ours_ns": 700, "eager_ns": 1000}]
    module = [_result(Case("rms_norm", 1, 64, "fp32", "module", 1), ours=3, eager=10)]
    found = bars.small_bars(module, cpp)
    verdicts = {bar.name: bar.verdict for bar in found}
    assert verdicts["small calls from Python, module, of nn.RMSNorm"] == bars.PASS
    assert _bar(found, "C++ up to 1x768").verdict == bars.PASS
    assert _bar(found, "C++ up to 8x4096").verdict == bars.FAIL
    (bar,) = bars.memory_bars([{"case": "a", "peak": 110, "bound": 100, "workspace": 1 << 20}])
    assert bar.verdict == bars.FAIL and bar.measured.startswith("1.10")


def test_disturbed_cases_say_so() -> None:
    results = [_result(Case("layer_norm", 64, 768, "fp32", "forward", 2), 400.0, ours=12, eager=10)]
    assert bars.sweep_bars(results)[0].failing == ["1.20 LayerNorm 64x768 fp32 forward, 2 threads, disturbed"]


def test_sweeps() -> None:
    """No case twice, the quick one small, and every bar's shapes in both."""
    full, quick = full_sweep((1, 2), ("avx2",)), quick_sweep((1, 2), ("avx2",))
    assert len(set(full)) == len(full) < 1000 and len(quick) < 160
    for sweep in (full, quick):
        assert {c.shape for c in sweep} >= set(BAR_SHAPES)
        assert {c.isa for c in sweep} == {"", "avx2"} and {c.threads for c in sweep} == {1, 2}
    assert {c.threads for c in full_sweep((1,), ())} == {1}


def test_the_filter_picks_cases(capsys: pytest.CaptureFixture[str]) -> None:
    picked = options.parse_arguments(
        "", ["--threads", "1", "--filter", "^RMSNorm 512x4096 bf16 forward, 1 thread$"]
    )
    assert list(map(str, picked.cases)) == ["RMSNorm 512x4096 bf16 forward, 1 thread"]
    fresh = options.parse_arguments("", ["--default-malloc", "--quick", "--threads", "1"]).cases
    assert {c.memory for c in fresh} == {FRESH}
    for pattern, message in (("(", "no regular expression"), ("GroupNorm", "no case is left")):
        with pytest.raises(SystemExit):
            options.parse_arguments("", ["--filter", pattern])
        assert message in capsys.readouterr().err


def test_a_tiny_run(tmp_path: Path) -> None:
    """Measured in a process of its own; written, drawn, and read again."""
    ran = _bench("--quick", "--shapes", "8x32", "--dtypes", "fp32", "--norms", "rms_norm", "--threads", "1",
                 "--directions", "forward,backward", "--out", tmp_path)  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = json.loads((tmp_path / "norms.json").read_text())
    assert [r["direction"] for r in run["results"]] == ["forward", "backward"]
    assert all(0 < r["ms"][name] < 10 for r in run["results"] for name in ("ours", "eager", "limit"))
    assert {bar["verdict"] for bar in run["bars"]} <= {
        bars.PASS,
        bars.FAIL,
        bars.NO_DATA,
        bars.NOT_APPLICABLE,
    }
    assert run["machine"]["cpu"] and run["machine"]["torch"]
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"speedup_forward.png", "limit_forward.png", "limit_backward.png"}
    again = _bench("--markdown", "--from-json", tmp_path / "norms.json")
    assert again.returncode == 0, again.stderr
    assert "| RMSNorm | dtype | forward 1 thread | fwd+bwd 1 thread |" in again.stdout
    assert "| bar | at most | measured | |" in again.stdout


def test_counting_script() -> None:
    script = ROOT / "benchmarks/count_instructions.sh"
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
