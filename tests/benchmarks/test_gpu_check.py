"""benchmarks/gpu_check.sh without a GPU: its syntax, and a dry run of all it does, test_cuda.py included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu_check.sh"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDNORM_")}
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)


def test_syntax() -> None:
    checked = _run("bash", "-n", SCRIPT)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck"):
        checked = _run("shellcheck", SCRIPT)
        assert checked.returncode == 0, checked.stdout


def test_unknown_argument_is_refused() -> None:
    refused = _run("bash", SCRIPT, "--fast")
    assert refused.returncode == 2 and "usage" in refused.stderr


def test_no_gpu_is_said(tmp_path: Path) -> None:
    """Neither program passes over a machine where nothing can be checked."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "PYTHON": sys.executable}
    timing = _run(sys.executable, ROOT / "benchmarks/gpu_check.py", "--out", tmp_path, **hidden)
    assert timing.returncode == 2 and "there is no GPU here: nothing was checked" in timing.stderr


@pytest.mark.slow(reason="runs two test files and the timing program of the GPU check: minutes")
def test_dry_run(tmp_path: Path) -> None:
    """Every step's verdict, and a JSON and a plot of the right content."""
    # One thread: what else runs on a small machine would otherwise keep every parallel region waiting.
    here = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = _run("bash", SCRIPT, "--dry-run", OUT=str(tmp_path), **here)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr
    summary = (tmp_path / "summary.txt").read_text()
    verdicts = {line.split()[0]: line.split()[1] for line in summary.splitlines() if len(line.split()) > 2}
    assert verdicts["tests_cuda"] == verdicts["tests_values"] == verdicts["timing"] == "PASS", summary
    assert verdicts["memcheck"] in ("MISSING", "-") and "nothing above ran on a GPU" in summary
    assert "==== tests_cuda: exit status 0" in (tmp_path / "logs.txt").read_text()

    run = json.loads((tmp_path / "gpu_check.json").read_text())
    assert run["dry_run"] and run["machine"]["device"] == "cpu" and not run["dropped"]
    assert len(run["values"]) > 100 and all(value["ok"] for value in run["values"])
    # Two norms, two dtypes, two directions, three widths; torch.compile at one of these.
    assert len(run["throughput"]) == 24
    for result in run["throughput"]:
        names = {"ours", "eager", "copy"} | ({"compile"} if result["cols"] == 4096 else set())
        assert set(result["us"]) == names and all(us > 0 for us in result["us"].values())
        assert result["gb_per_s"] > 0 and result["of_copy"] > 0
    assert len(run["host"]) == 48 and all(set(result["us"]) == {"ours", "eager"} for result in run["host"])
    assert [bar["cases"] for bar in run["bars"]] == [8, 8, 12, 48, 8]
    assert {bar["verdict"] for bar in run["bars"]} <= {"PASS", "FAIL"}
    if run["plot"]:
        assert (tmp_path / run["plot"]).read_bytes().startswith(b"\x89PNG")
    else:
        pytest.importorskip("matplotlib", reason="no plot without it")
        pytest.fail("matplotlib is here, and yet there is no plot")


def test_time_runs_out(tmp_path: Path) -> None:
    """With no time left everything is left out, and named: the bars are then not measured, not met."""
    code = "import gpu_check as g; c = g.Check('cpu', False, 0.0); c.run((4096, 256)); print(len(c.dropped));"
    code += "print({b['verdict'] for b in g.bars(c.throughput, c.host)}, c.dropped[-1])"
    path = f"{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"
    ran = _run(sys.executable, "-c", code, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["36", "{'NOT MEASURED'} RMSNorm fp32 N=4096 with torch.compile"]
