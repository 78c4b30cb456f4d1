"""Times fusednorm beside all others on the CPU: checks the values, times, and writes JSON, pictures and bars.

Every case times, in turn and in one run, ours, torch eager, torch.compile (at the bar shapes), ONNX Runtime
(forward without grad), and the limit: ``x.clone()`` moves the bytes of a forward, ``torch.add(x, g)`` those
of a backward, into new memory. Freed memory stays with the process, except in cases of "fresh memory" and
with --default-malloc: page faults would cost more than the norms do. Each instruction set and kind of memory
is measured in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fusednorm
import machine
import onnx_candidates
import plots
from bars import all_bars, bars_markdown, is_noisy
from options import parse_arguments
from report import markdown, text_table
from shapes import KEPT, Case

QUICK_SCALE = 0.35  # of the time of each case
LISTED = 12  # failing cases printed for a bar


def run_worker(cases: Sequence[Case], plan: dict[str, Any], out: Path) -> dict[str, Any]:
    """Measures cases of one instruction set and one kind of memory in a process of its own."""
    isa, memory = cases[0].isa, cases[0].memory
    # What torch.compile has once built, a second run finds again.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(out / "inductor")}
    if isa:
        environment["ATEN_CPU_CAPABILITY"] = isa
    plan = plan | {"cases": [asdict(c) for c in cases], "keep_memory": memory == KEPT}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "plan.json"), Path(folder, "results.json")
        asked.write_text(json.dumps(plan))
        worker = Path(__file__).with_name("worker.py")
        subprocess.run([sys.executable, str(worker), str(asked), str(answered)], env=environment, check=True)
        found: dict[str, Any] = json.loads(answered.read_text())
    return found


def small_calls_cpp(program: Path) -> list[dict[str, Any]]:
    """What bench_small_calls prints: a line of JSON for each shape."""
    if not program.exists():
        print(f"no {program.name} in {program.parent}: small calls from C++ are left out", file=sys.stderr)
        return []
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def main() -> None:
    """Measures, prints and stores."""
    args = parse_arguments(__doc__)
    if args.list:
        print("\n".join(map(str, args.cases)))
        return
    if args.from_json:
        bars = all_bars(args.stored)
        print(
            f"{markdown(args.stored)}\n\n{bars_markdown(bars)}\n\n{machine.sentence(args.stored['machine'])}"
        )
        return
    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    if onnx_candidates.MISSING:
        print("no onnxruntime or onnx (benchmarks/requirements.txt): timed without", file=sys.stderr)
    start, here = time.monotonic(), machine.describe()
    whole = not args.filter.pattern and not args.shapes  # a filter asks for cases, not for the rest
    scale = QUICK_SCALE if args.quick else 1.0
    results: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    kept = True
    for (isa, kind), group in itertools.groupby(args.cases, key=lambda c: (c.isa, c.memory)):
        plan = {
            "scale": scale,
            "compile": args.compile,
            "memory": whole and not isa and kind == KEPT,
            "progress": sys.stderr.isatty() or whole,
        }
        found = run_worker(list(group), plan, args.out)
        results += found["results"]
        memory += found.get("memory", [])
        kept = kept and found["keeps_memory"] if kind == KEPT else kept
    run: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": here["cpu"],
        "torch": here["torch"],
        "machine": here,
        "threads": args.threads,
        "keeps_memory": kept and not args.default_malloc,
        "onnxruntime": onnx_candidates.version(),
        "fusednorm": fusednorm.build_info(),
        "results": results,
        "memory": memory,
        "small_calls_cpp": small_calls_cpp(args.programs / "bench_small_calls") if whole else [],
        "seconds": round(time.monotonic() - start, 1),
    }
    bars = all_bars(run)
    run["bars"] = [asdict(bar) for bar in bars]
    (args.out / "norms.json").write_text(json.dumps(run, indent=1) + "\n")
    pictures = plots.draw(results, f"fusednorm on {run['cpu']}, torch {run['torch']}", args.out)

    print(markdown(run) if args.markdown else text_table(results))
    print(f"\n{bars_markdown(bars, 0 if args.markdown else LISTED)}\n")
    print(f"{machine.sentence(here)}, {run['date'][:10]}")
    print(f"{run['seconds']:.0f} s; wrote norms.json, {', '.join(pictures)}", file=sys.stderr)
    if noisy := [r for r in results if is_noisy(r)]:
        note = f"other processes disturbed {len(noisy)} of {len(results)} cases, whose times mean little"
        print(f"warning: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
