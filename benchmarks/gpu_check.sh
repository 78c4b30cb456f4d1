#!/usr/bin/env bash
# Builds for the GPU that is here, runs the CUDA tests, then times: one command, 8 minutes at most, no network.
#
#   benchmarks/gpu_check.sh              on a machine with a GPU, nvcc, CMake and a torch with CUDA
#   benchmarks/gpu_check.sh --dry-run    what is possible without: tools, test bodies and timing program on the CPU
#
# PYTHON names the interpreter (else the first one whose torch fits), OUT the folder for what is worth keeping
# (else build-gpu/out): summary.txt, logs.txt with every step's output, gpu_check.json, gpu_check.png. Few files, since
# what a lent machine hands back is counted. The build stays in build-gpu/ and is used again.
# A step that fails does not stop the others. Exit status: 0 when none failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

dry=
case "${1-}" in
  "") ;;
  --dry-run) dry=1 ;;
  *) echo "usage: benchmarks/gpu_check.sh [--dry-run]" >&2; exit 2 ;;
esac

readonly total=470   # seconds; the last ten are for the summary and for what a timeout leaves behind
readonly reserve=110 # kept for the timing, which comes last: bars of which nothing is measured are not met
root=$PWD
work=$root/build-gpu
[ -n "$dry" ] && work=${OUT:-$root/build/gpu_check}
logs=$work/log
out=${OUT:-$work/out}
mkdir -p "$logs" "$out" || exit 2
rm -f "$logs"/*.log "$out/logs.txt" "$out/summary.txt" "$out/gpu_check.json" "$out/gpu_check.png"

names=() verdicts=() times=() notes=()
failed=0

record() { # NAME VERDICT SECONDS NOTE
  names+=("$1") verdicts+=("$2") times+=("$3") notes+=("$4")
  printf '%-13s %-8s %4s s  %s\n' "$1" "$2" "$3" "$4"
  case $2 in FAIL | "NOT RUN") failed=1 ;; esac
}

# Runs a command within the limit, and within what is left before the reserve (0 for the last step).
step() { # NAME LIMIT RESERVE COMMAND...
  local name=$1 limit=$2 left=$((total - SECONDS - $3)) start=$SECONDS rc log=$logs/$1.log
  shift 3
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    record "$name" "NOT RUN" 0 "no time left"
    return 1
  fi
  timeout --kill-after=5 "$limit" "$@" > "$log" 2>&1
  rc=$?
  { echo "==== $name: $*"; cat "$log"; echo "==== $name: exit status $rc"; echo; } >> "$out/logs.txt"
  case $rc in
    0) record "$name" PASS $((SECONDS - start)) "$(tail -n 1 "$log" | cut -c 1-90)"; return 0 ;;
    124 | 137) record "$name" FAIL $((SECONDS - start)) "stopped at its limit of $limit s" ;;
    *) record "$name" FAIL $((SECONDS - start)) "exit status $rc" ;;
  esac
  [ "$name" = timing ] || tail -n 25 "$log" | sed 's/^/    | /'  # that one is printed whole
  return 1
}

finish() {
  {
    echo
    printf '%-13s %-8s %s\n' step verdict "seconds"
    for i in "${!names[@]}"; do
      printf '%-13s %-8s %4s  %s\n' "${names[i]}" "${verdicts[i]}" "${times[i]}" "${notes[i]}"
    done
    [ -n "$dry" ] && echo "dry run: nothing above ran on a GPU"
    echo "$SECONDS s in all; kept in $out"
  } | tee "$out/summary.txt"
  exit "$failed"
}

# ---- Tools: what is missing is said plainly ------------------------------------------------------------

fits() { # whether this interpreter's torch sees a GPU; in a dry run, whether the package that is built imports
  local code='import torch, sys; sys.exit(not torch.cuda.is_available())'
  [ -n "$dry" ] && code='import fusednorm'
  "$1" -c "$code" > /dev/null 2>&1
}

python=
if [ -n "$dry" ]; then # a caller's PYTHONPATH first (ctest names its own build), then make's
  for stage in "${PYTHONPATH-}" "$root/build/stage"; do
    export PYTHONPATH=$stage
    for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3; do
      if [ -z "$python" ] && fits "$candidate"; then python=$candidate; fi
    done
    [ -n "$python" ] && break
  done
  [ -n "$python" ] || { record tools FAIL 0 "no built package: run make first"; finish; }
else
  for candidate in ${PYTHON:+"$PYTHON"} python3 python .venv/bin/python; do
    if [ -z "$python" ] && fits "$candidate"; then python=$candidate; fi
  done
  [ -n "$python" ] || { record tools FAIL "$SECONDS" "no python whose torch sees a GPU (PYTHON names one)"; finish; }
fi
python=$("$python" -c 'import sys; print(sys.executable)')
# Tools that came by pip lie beside the interpreter; CUDA's are often not on the PATH.
PATH=$PATH:$(dirname "$python"):${CUDA_HOME:-/usr/local/cuda}/bin
export PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

has() { command -v "$1" > /dev/null; }
has_module() { "$python" -c "import $1" > /dev/null 2>&1; }

missing=() optional=()
cmake=(cmake)
if ! has cmake; then
  if has_module cmake; then cmake=("$python" -m cmake); else missing+=("cmake"); fi
fi
generator="Unix Makefiles"
if has ninja; then generator=Ninja; elif ! has make; then missing+=("ninja or make"); fi
has c++ || has g++ || missing+=("a C++ compiler")
has nvcc || missing+=("nvcc")
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || missing+=("Python.h (python3-dev)")
has compute-sanitizer || optional+=("compute-sanitizer (memcheck, racecheck)")
has_module pytest || optional+=("pytest (the tests)")
has_module matplotlib || optional+=("matplotlib (the plot)")

about=$("$python" -c 'import platform, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"python {platform.python_version()}, torch {torch.__version__}, {gpu}")')
note=$about
[ ${#missing[@]} -gt 0 ] && note+="; MISSING: $(printf '%s, ' "${missing[@]}")"
[ ${#optional[@]} -gt 0 ] && note+="; missing, gone without: $(printf '%s, ' "${optional[@]}")"
if [ ${#missing[@]} -gt 0 ] && [ -z "$dry" ]; then
  record tools FAIL "$SECONDS" "${note%, }"
  finish
fi
record tools PASS "$SECONDS" "${note%, }"

# ---- Build, for this GPU alone -------------------------------------------------------------------------

if [ -n "$dry" ]; then
  record build "-" 0 "dry run: the package at ${PYTHONPATH:-its installed place} is used"
else
  archs=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  export FUSEDNORM_CUDA_ARCHS=$archs
  # A cache of another place, interpreter, torch or generator is an error to CMake, or worse, is none.
  stamp="$root $python $about $archs $generator"
  [ "$(cat "$work/stamp" 2> /dev/null)" = "$stamp" ] || rm -rf "$work/cmake" "$work/stage"
  step configure 60 "$reserve" "${cmake[@]}" -S . -B "$work/cmake" -G "$generator" \
    -DPython_EXECUTABLE="$python" -DFUSEDNORM_CUDA_ARCHS="$archs" -DFUSEDNORM_BUILD_TESTS=OFF || finish
  echo "$stamp" > "$work/stamp"
  step build 240 "$reserve" "${cmake[@]}" --build "$work/cmake" -j "$(nproc)" || finish
  step install 20 "$reserve" "${cmake[@]}" --install "$work/cmake" --prefix "$work/stage" || finish
  export PYTHONPATH=$work/stage
  step import 60 "$reserve" "$python" -c 'import fusednorm
info = fusednorm.build_info()
print(info)
assert info["cuda"], "the build has no CUDA"
print("CUDA", info["cuda"], "for", info["cuda_architectures"])' || finish
fi

# ---- Tests -----------------------------------------------------------------------------------------------

test_device=cuda general=(tests/operators/test_guarantees.py tests/operators/test_values.py)
[ -n "$dry" ] && test_device=cpu general=(tests/operators/test_guarantees.py) # the switch is what a dry run tests
pytest=("$python" -m pytest -p no:cacheprovider --maxfail=25 --tb=short -rfs)
if has_module pytest; then
  step tests_cuda 150 "$reserve" env FUSEDNORM_DRY_RUN="${dry:-0}" "${pytest[@]}" tests/operators/test_cuda.py
  step tests_values 90 "$reserve" env FUSEDNORM_TEST_DEVICE=$test_device "${pytest[@]}" "${general[@]}"
else
  record tests_cuda MISSING 0 "no pytest: values are checked below instead, streams, graphs and bits are not"
  step values 60 "$reserve" "$python" benchmarks/gpu_check.py --values-only ${dry:+--dry-run} --out "$out"
fi

for tool in memcheck racecheck; do
  if ! has compute-sanitizer; then
    record $tool MISSING 0 "no compute-sanitizer: not run"
  elif [ -n "$dry" ]; then
    record $tool "-" 0 "dry run: needs a GPU"
  else
    # Uncached memory: an access behind a tensor is then outside of what was allocated. Errors that API calls
    # return are left to torch, which asks for what may not be there; a failed launch raises.
    step $tool 60 "$reserve" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool \
      --error-exitcode 3 --report-api-errors no "$python" benchmarks/gpu_check.py --values-only --out "$out"
  fi
done

# ---- Times, with what time is left -----------------------------------------------------------------------

left=$((total - SECONDS - 15))
[ -n "$dry" ] && left=60
step timing $((left + 10)) 0 "$python" benchmarks/gpu_check.py --seconds $left ${dry:+--dry-run} --out "$out"
[ -f "$logs/timing.log" ] && cat "$logs/timing.log"
finish
