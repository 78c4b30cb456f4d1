#!/usr/bin/env bash
# Counts the instructions of the CPU kernels under valgrind: exact, so that a change compares with what was before.
#
#   benchmarks/count_instructions.sh [--compare OLD.json] [OUT.json]     (build/bench/instructions.json)
#
# Prints instructions per element of both norms, forward and backward, by the avx2 and portable kernels (valgrind
# knows no AVX-512). PROGRAM names a count_instructions built elsewhere; else it is built here, in BUILD (build).
set -euo pipefail
cd "$(dirname "$0")/.."

old=""
if [[ "${1:-}" == --compare ]]; then
  old="${2:?usage: $0 [--compare OLD.json] [OUT.json]}"
  shift 2
fi
out="${1:-build/bench/instructions.json}"
build="${BUILD:-build}"
if ! command -v valgrind > /dev/null; then
  echo "valgrind is missing (Debian: apt install valgrind)" >&2
  exit 2
fi
if [[ -z "${PROGRAM:-}" ]]; then
  cmake --build "$build/cmake" --target count_instructions > /dev/null
  PROGRAM="$build/cmake/count_instructions"
fi

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
valgrind -q --tool=callgrind --callgrind-out-file="$folder/out" "$PROGRAM" > /dev/null 2> "$folder/log" ||
  { cat "$folder/log" >&2; exit 1; }
mkdir -p "$(dirname "$out")"
# A dump for each case: its name in the trigger, its count in the summary.
python3 - "$folder" "$out" "$old" << 'PYTHON'
import json
import re
import sys
from pathlib import Path

folder, out, old = sys.argv[1:]
counts = {}
for path in sorted(Path(folder).glob("out.*"), key=lambda p: int(p.suffix[1:])):
    text = path.read_text()
    name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.M)
    if name:
        counts[name[1]] = int(re.search(r"^summary: (\d+)", text, re.M)[1])
if not counts:
    sys.exit("valgrind wrote no counts: was the program built with valgrind's header?")
before = json.loads(Path(old).read_text())["instructions"] if old else {}
print(f"{'case':<48}{'instructions':>14}{'an element':>12}" + f"{'before':>14}{'change':>9}" * bool(old))
for name, count in counts.items():
    rows, cols = map(int, re.search(r"(\d+)x(\d+)", name).groups())
    line = f"{name:<48}{count:>14}{count / (rows * cols):>12.3f}"
    if name in before:
        line += f"{before[name]:>14}{count / before[name] - 1:>+9.1%}"
    print(line)
Path(out).write_text(json.dumps({"instructions": counts}, indent=1) + "\n")
PYTHON
echo "wrote $out"
