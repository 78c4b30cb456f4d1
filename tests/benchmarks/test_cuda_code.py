"""What nvcc made of the kernels, read from the library: spills, access widths, registers, bytes in flight."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import cuda_code  # noqa: E402
from cuda_code import BYTES_IN_FLIGHT, NORMS, Code, Entry, Kernel  # noqa: E402

# Every plan has kernels of its own for each of these.
DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("float64", "float64"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
]
SAME = DTYPES[:3]
# From 512 on: the table's, and what lies beside the switch-overs, where lanes idle.
POWERS = [n for n in cuda_code.COLUMNS if n >= 512]
ODD = sorted(
    {n + d for n in (*POWERS, 640, 1536, 3072, 6000, 24000, 100_000, 400_000) for d in (-8, 0, 8, 9)}
)

# Plans with less in flight, by (direction, dtype, kernel), and why they cannot have it.
EXCEPTIONS: dict[tuple[str, str, str], str] = {
    ("forward", "float32", "streaming"): "the compiler uses the first of four loads before the fourth: 24 KB",
}


def _architectures() -> list[int]:
    try:
        return cuda_code.architectures(cuda_code.installed_library())
    except cuda_code.NothingToRead:
        return []


@pytest.fixture(scope="module", params=_architectures() or [0], ids=lambda arch: f"sm_{arch}")
def code(request: pytest.FixtureRequest) -> Code:
    try:
        library = cuda_code.installed_library()
        cuda_code.architectures(library)
    except cuda_code.NothingToRead as nothing:
        pytest.skip(str(nothing))
    if not request.param:
        pytest.skip(f"{library.name} has no machine code, PTX alone")
    return Code(library, request.param)


def _tuned(code: Code) -> list[Kernel]:
    return [kernel for kernel in code.kernels if not kernel.is_empty]


def _entries(
    code: Code, columns: list[int], dtypes: list[tuple[str, str]] = SAME, rows: int = 0
) -> Iterator[Entry]:
    for direction in ("forward", "backward"):
        for norm in NORMS:
            for dtype, other in dtypes:
                for cols in columns:
                    yield code.entry(direction, norm, dtype, cols, other, rows)


def _which(entry: Entry) -> str:
    return f"{entry.direction} {entry.norm} {entry.dtype} N={entry.cols} ({entry.kernel})"


def test_number_of_kernels(code: Code) -> None:
    """As written where they are instantiated: of 16-byte units, or of 32-byte ones from sm_100 on."""
    source = (ROOT / "csrc/cuda/kernels/row_norm_launch.cu").read_text().replace("\n//", "")
    written = re.search(r"With (\d+) pairs (\d+) or (\d+), and (\d+) or (\d+) empty ones", source)
    assert written, "row_norm_launch.cu no longer says how many kernels there are"
    pairs, narrow, wide, empty_narrow, empty_wide = map(int, written.groups())
    expected = (wide, empty_wide) if code.arch >= 100 else (narrow, empty_narrow)
    tuned = _tuned(code)
    assert (len(tuned), len(code.kernels) - len(tuned)) == expected
    assert pairs == len({kernel.cubin for kernel in tuned}) == len(DTYPES)
    assert not [kernel.signature for kernel in code.kernels if not kernel.family], "a kernel of no known name"


def test_every_kernel_has_a_plan(code: Code) -> None:
    columns = [m * 2**n for m in (1, 3) for n in range(23)]  # 3: rows of three units a thread
    planned = {k.symbol for e in _entries(code, columns, DTYPES) for k in e.kernels}
    rest = [k for k in _tuned(code) if k.symbol not in planned and k.family != "reduce"]
    # The first of two launches of an add's backward stores no gradient, and is a plain one of its dtypes.
    mixed = {k.name for k in rest if k.phase == "sums" and k.dtype == "float32" and k.other != "float32"}
    others = {k.name for k in rest if not k.adds} - mixed
    assert not others and len(mixed) == 2, "compiled for nothing"


def test_every_sum_has_a_kernel(code: Code) -> None:
    """The residual add has the plans, and so the kernels, of its residual's rows: but one loop for two."""
    tuned = _tuned(code)
    rows = {
        dtype: [k for k in tuned if not k.adds and k.dtype == k.other == dtype] for dtype in cuda_code.SIZE
    }
    for dtype, residual in DTYPES:
        plain = {(k.family, k.units, k.phase, k.unit_bytes) for k in rows[residual]}
        plain = {k for k in plain if k[0] != "reduce" and k[2] != "sums"}
        of_sums = [k for k in tuned if k.adds and (k.dtype, k.other) == (residual, dtype)]
        keys = [(k.family, k.units, k.phase, k.unit_bytes) for k in of_sums]
        assert set(keys) == plain and len(keys) == len(plain), (dtype, residual)


def test_no_spill_local_memory_atomic_or_fp64(code: Code) -> None:
    """fp64: in fp32 and 16-bit kernels, on the cheapest way of a row from its load to its store.

    The code of extreme rows (ldexp of eps) lies beside that way and may use it.
    """
    found = [f"{kernel.name}: {fault}" for kernel in _tuned(code) for fault in cuda_code.faults(kernel)]
    assert not found, "\n".join(found)


def test_fp64_arithmetic_does_not_come_with_every_unit(code: Code) -> None:
    """What is unrolled with a thread's units is on the way of every row that has a weight or a bias."""
    found: dict[str, dict[int, int]] = {}
    for kernel in _tuned(code):
        if kernel.residence == "registers" and kernel.dtype != "float64":
            name = f"{kernel.dtype}/{kernel.other} {kernel.adds}"
            double = sum(
                n for opcode, n in kernel.opcodes.items() if re.match(r"D(ADD|MUL|FMA|SETP)\b", opcode)
            )
            found.setdefault(name, {})[kernel.units] = double
    grows = {name: by_units for name, by_units in found.items() if len(set(by_units.values())) > 1}
    assert found and not grows


def test_called_functions_have_no_fp64(code: Code) -> None:
    """What test_no_spill... cannot see: a way is followed past calls."""
    for kernel in _tuned(code):
        if kernel.dtype != "float64":
            called = re.findall(r"^\$\S+__cuda_\S*(?:f64|dbl|dsqrt|drsqrt)\S*:", kernel.code, re.M)
            assert not called, kernel.name


def test_accesses_are_as_wide_as_units(code: Code) -> None:
    """128 bits, on sm_100 and later 256 where they go to registers; half for 16 bits beside fp32."""
    kernels = [k for k in _tuned(code) if k.family != "reduce"]
    assert {k.unit_bytes for k in kernels if k.family == "forward"} == {32 if code.arch >= 100 else 16}
    found = {kernel.name: narrow for kernel in kernels if (narrow := cuda_code.narrow(kernel))}
    assert not found


def test_registers_are_within_the_plan(code: Code) -> None:
    for entry in _entries(code, [32, *POWERS, 2**22], DTYPES):
        assert entry.registers <= entry.max_registers, _which(entry)
        assert entry.stack == entry.local == 0 or entry.dtype == "float64", _which(entry)


def test_blocks_per_sm_are_what_the_plan_assumes(code: Code) -> None:
    """By the registers that the kernel has and as the hardware deals them, at least as many."""
    found = [
        f"{_which(entry)}: {entry.blocks_per_sm} blocks, not {entry.assumed_blocks} of {entry.threads}"
        for entry in _entries(code, ODD, DTYPES)
        if not entry.blocks_per_sm >= entry.assumed_blocks >= 1
    ]
    assert not found, "\n".join(found)


def test_bytes_in_flight(code: Code) -> None:
    """32 KB on an SM from N = 512 on: what rows of this length ask for, with the kernel's own registers."""
    if code.arch != 90:
        pytest.skip("the bar is one for sm_90")
    short = [entry for entry in _entries(code, POWERS) if entry.bytes_in_flight < BYTES_IN_FLIGHT]
    plans = {(entry.direction, entry.dtype, entry.kernel) for entry in short}
    found = [
        f"{_which(entry)}: {entry.bytes_in_flight:,}, {entry.why}"
        for entry in short
        if (entry.direction, entry.dtype, entry.kernel) not in EXCEPTIONS
    ]
    assert not found, "\n".join(found)
    assert set(EXCEPTIONS) <= plans, "no exceptions any more"


def test_bytes_in_flight_beside_the_switch_overs(code: Code) -> None:
    """Lanes idle there; three quarters are left at least."""
    if code.arch != 90:
        pytest.skip("the bar is one for sm_90")
    found = [
        f"{_which(entry)}: {entry.bytes_in_flight:,}"
        for entry in _entries(code, [n for n in ODD if n >= 512])
        if (entry.direction, entry.dtype, entry.kernel) not in EXCEPTIONS
        and entry.bytes_in_flight < 0.75 * BYTES_IN_FLIGHT
    ]
    assert not found, "\n".join(found)


def test_loads_of_a_row_are_issued_together(code: Code) -> None:
    """All units of a thread before the first is used, where the row goes to registers.

    A sum has two loads for each unit: half of them are the bytes that a plain row of its length has.
    """
    kernels = [k for k in _tuned(code) if k.residence == "registers"]
    found = {k.name: k.loads_together for k in kernels if k.loads_together < k.units / (1 + k.adds)}
    assert kernels and not found


def test_copies_are_asynchronous(code: Code) -> None:
    """Rows on their way to shared memory: cp.async and its waits."""
    for kernel in _tuned(code):
        if kernel.family == "backward" or kernel.residence == "shared memory":
            assert kernel.count(frozenset({"LDGSTS"})) > 0, kernel.name
            assert kernel.count(frozenset({"LDGDEPBAR"})) > 0, kernel.name
            assert kernel.count(frozenset({"DEPBAR"})) > 0, kernel.name


def test_partial_sums_stay_small(code: Code) -> None:
    """Under 5 % of the traffic where rows are many; 132 SMs of an H100 idle for 3 % at most."""
    for entry in _entries(code, POWERS):
        if entry.direction == "backward":
            assert entry.partial_share is not None and entry.quantisation_loss is not None
            assert entry.partial_share < 0.05, _which(entry)
            assert entry.quantisation_loss[132] <= 0.035, _which(entry)


# ---- The checks themselves ----

BAD_KERNELS = """
__global__ void spills(float* x, int n) {  // more values than registers
  float v[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k) {
    #pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 37) % 96] + x[k];
  }
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
__global__ void __launch_bounds__(1024, 2) spills_bounded(float* x, int n) {
  float v[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k) {
    #pragma unroll
    for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 37) % 96] + x[k];
  }
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
__global__ void indexed(float* x, const int* at) {  // an array that is indexed: local memory
  float v[256];
  #pragma unroll 1
  for (int i = 0; i < 256; ++i) v[at[i] & 255] = x[i * blockDim.x + threadIdx.x];
  x[threadIdx.x] = v[at[threadIdx.x] & 255];
}
__global__ void scalar(const float* x, float* y) {  // 32 bits where 128 are asked for
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = x[threadIdx.x * 4 + i] * 2.0f;
}
__global__ void adds(float* x, float v) { atomicAdd(x, v); }
__global__ void doubles(const float* x, float* y, double eps) {
  y[threadIdx.x] = static_cast<float>(x[threadIdx.x] * eps);
}
__global__ void rarely_doubles(const float* x, float* y, double eps) {
  float v = x[threadIdx.x];
  if (!(v < 1e30f)) {
    v = static_cast<float>(v * (eps + v));
    for (int i = 0; i < threadIdx.x % 7; ++i) v = static_cast<float>(v * (eps + i));
  }
  y[threadIdx.x] = v;
}
__global__ void one_by_one(const uint4* x, uint4* y, int n, const float* f) {
  uint4 sum = {};
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const uint4 v = __ldg(x + i * blockDim.x);
    sum.x += v.x; sum.y ^= v.y; sum.z += v.z; sum.w ^= v.w;
  }
  y[threadIdx.x] = sum;
}
__global__ void named_barrier(float* x, int id) {
  x[threadIdx.x] = 1;
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(64) : "memory");
  x[threadIdx.x + 1] = 2;
}
__global__ void together(const uint4* x, uint4* y) {
  uint4 v[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __ldg(x + i * blockDim.x);
  uint4 sum = {};
  #pragma unroll
  for (int i = 0; i < 4; ++i) { sum.x += v[i].x; sum.y ^= v[i].y; sum.z += v[i].z; sum.w ^= v[i].w; }
  y[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """Kernels with the faults that are looked for, by name."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        pytest.skip("no nvcc")
    try:
        cuda_code.tool("cuobjdump"), cuda_code.tool("nvdisasm")
    except cuda_code.NothingToRead as nothing:
        pytest.skip(str(nothing))
    folder = tmp_path_factory.mktemp("bad")
    source, cubin = folder / "bad.cu", folder / "bad.cubin"
    source.write_text(BAD_KERNELS)
    subprocess.run([nvcc, "-cubin", "-arch=sm_90", "-o", cubin, source], check=True)
    return {kernel.signature.split("(")[0]: kernel for kernel in cuda_code.read_cubin(cubin)}


def test_seeded_spill_is_found(bad: dict[str, Kernel]) -> None:
    assert bad["spills"].registers > 96 and not cuda_code.faults(bad["spills"])
    found = cuda_code.faults(bad["spills_bounded"])
    assert any("stack" in fault for fault in found) and any("spills" in fault for fault in found)
    assert any("stack" in fault for fault in cuda_code.faults(bad["indexed"]))


def test_seeded_narrow_access_is_found(bad: dict[str, Kernel]) -> None:
    loads, stores = cuda_code.narrow(bad["scalar"], 128, 128)
    assert loads.startswith("no 128-bit loads: {32:") and stores.startswith("no 128-bit stores: {32:")
    assert not cuda_code.narrow(bad["together"], 128, 128)


def test_seeded_atomic_is_found(bad: dict[str, Kernel]) -> None:
    assert cuda_code.faults(bad["adds"]) == ["1 atomics"]


def test_seeded_fp64_is_found_where_every_row_pays_for_it(bad: dict[str, Kernel]) -> None:
    (found,) = cuda_code.faults(bad["doubles"])
    assert found.startswith("fp64 in an ordinary row: DMUL")
    assert any(map(cuda_code.is_double, bad["rarely_doubles"].opcodes))
    assert not cuda_code.faults(bad["rarely_doubles"])


def test_seeded_loads_one_by_one_are_found(bad: dict[str, Kernel]) -> None:
    assert bad["one_by_one"].loads_together == 1
    assert bad["together"].loads_together == 4


def test_barriers_that_a_block_claims_count(bad: dict[str, Kernel]) -> None:
    """An SM has two for each of its 32 blocks; a block that names one at run time claims 16."""
    assert bad["named_barrier"].barriers == 16 and bad["together"].barriers == 1
    sm = cuda_code.sm_of(90)
    assert cuda_code.blocks_per_sm(128, 40, 0, sm, barriers=1) == 12
    assert cuda_code.blocks_per_sm(128, 40, 0, sm, barriers=16) == 4


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (128, 48, 0, 10),
        (128, 47, 0, 10),  # in steps of 8
        (160, 80, 96, 4),  # 24 warps, not 25: each quarter of the SM has room for 6
        (512, 128, 0, 1),
        (64, 16, 0, 32),
        (512, 32, 100 * 1024, 2),
        (512, 32, 227 * 1024, 1),
    ],
)
def test_blocks_per_sm(threads: int, registers: int, shared: int, blocks: int) -> None:
    """Worked by hand from cuda_occupancy.h, for sm_90."""
    assert cuda_code.blocks_per_sm(threads, registers, shared, cuda_code.sm_of(90)) == blocks
