"""The tables and pictures of benchmarks/README.md: not stale, written between markers, narrow enough."""

import json
import math
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gallery_report  # noqa: E402  (the benchmarks are programs, no package)
import plots  # noqa: E402
import tables  # noqa: E402
from gallery_variants import VARIANTS  # noqa: E402
from shapes import full_sweep  # noqa: E402

MACHINE = {"cpu": "a CPU", "torch": "2.15.0", "cores": 2, "l3_bytes": 32 << 20, "capability": "AVX2",
           "kernels": "avx2", "huge_pages": "madvise", "load_before": [0.0]}  # fmt: skip
WIDEST = 1200


def _width(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">I", head[16:20])[0]


def _run() -> dict[str, Any]:
    """All cases of a run, with made-up times."""
    results = []
    for case in full_sweep((1, 2), ("avx2",)):
        others = {"eager": 2.0, "compile": 1.5, "onnxruntime": 1.2, "limit": 0.5}
        if case.norm.startswith("add"):
            others["unfused"] = 1.4
        ms = {"ours": 1.0, **others}
        results.append(asdict(case) | {"ms": ms, "gb_per_s": 1.0, "interruptions_per_s": 0.0})
    return {
        "cpu": "a CPU",
        "torch": "2.15.0",
        "date": "2026-12-07T10:00:00",
        "machine": MACHINE,
        "results": results,
    }


def test_instruction_counts_are_as_stored() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks/tables.py", "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_instructions_for_each_element() -> None:
    table = tables.instructions({"instructions": {"avx2 rms_norm 4x8 fp32 forward": 48}}).splitlines()
    assert table[0] == "| kernels | norm | shape | fp32 forward |"
    assert table[2] == "| avx2 | RMSNorm | 4x8 | 1.50 |"


@pytest.mark.parametrize("name", ["bars", "norms"])
def test_a_table_of_a_run(name: str, tmp_path: Path) -> None:
    """Stale, then written, then not stale; what stands around it stays."""
    page, stored = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text(f"before\n<!-- begin {name} -->\nold\n<!-- end {name} -->\nafter\n")
    stored.write_text(json.dumps(_run()))
    arguments = [name, "--page", str(page), "--from-json", str(stored)]
    assert tables.main([*arguments, "--check"]) == 1
    assert "\nold\n" in page.read_text()
    assert tables.main(arguments) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert "2026-12-07" in text and "a CPU" in text
    assert tables.main([*arguments, "--check"]) == 0


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="instructions: expected its markers once on the page, found 0"):
        tables.main(["instructions", "--page", str(page)])
    with pytest.raises(SystemExit, match="there is no .*nowhere.json"):
        tables.main(["norms", "--page", str(page), "--from-json", str(tmp_path / "nowhere.json")])
    with pytest.raises(SystemExit):
        tables.main(["nonsense"])
    assert "no table nonsense" in capsys.readouterr().err


def test_pictures_of_a_run(tmp_path: Path) -> None:
    names = plots.draw(_run()["results"], "made up", tmp_path)
    assert names == [
        "speedup_forward.png",
        "speedup_forward_backward.png",
        "limit_forward.png",
        "limit_backward.png",
    ]
    assert all(_width(tmp_path / name) <= WIDEST for name in names)


def test_pictures_of_the_gallery(tmp_path: Path) -> None:
    run = {"losses": [4.0, math.inf, 3.0], "gradient_norms": [[1.0, 2.0], [3.0, 4.0]], "val_loss": 2.5}
    stack = {"stack": "F(x)", "gradient_norms": [1.0, 2.0]}
    results = {
        "runs": [run | {"name": v.name, "groups": list(v.groups)} for v in VARIANTS],
        "settings": dict.fromkeys(("steps", "layers", "width"), 1),
        "claims": {"deep_gradients": [stack | {"initialisation": i} for i in gallery_report.INITIALISATIONS]},
        "machine": MACHINE,
    }
    names = gallery_report.plot(results, tmp_path)
    assert names == [
        "gallery_norms.png",
        "gallery_placements.png",
        "gallery_hard_start.png",
        "gallery_stacks.png",
    ]
    assert all(_width(tmp_path / name) <= WIDEST for name in names)


def test_the_picture_of_the_first_page(tmp_path: Path) -> None:
    """It is drawn from the table of times that stands in benchmarks/README.md."""
    page = tables.PAGE.read_text(encoding="utf-8")
    rows = plots.rows_of(page, "RMSNorm", "fwd+bwd 1 thread")
    assert len(rows) >= 8 and all(value > 0 for _, _, value in rows)
    plots.draw_speed(page, tmp_path / "speed.png")
    assert _width(tmp_path / "speed.png") <= WIDEST
