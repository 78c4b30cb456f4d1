"""Reads the compiled CUDA kernels: registers, access widths, occupancy, bytes in flight. Needs no GPU.

The tools (cuobjdump, nvdisasm) are those of the Triton wheel that torch brings, or a toolkit's. For a plan of
launch_config.h the kernel that it launches is looked up, and what the plan promises is counted again from the
code: blocks on an SM by the registers that the kernel really has, and the bytes on their way to an SM.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import heapq
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

COLUMNS = (32, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
DTYPES = ("bfloat16", "float32")
NORMS = ("layer_norm", "rms_norm")
ELEMENTS = 2**28  # of the tensors in the table: so many that rows do not run short
BYTES_IN_FLIGHT = 32 * 1024  # an SM's share of an H200's 4.8 TB/s times 0.9 us

SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_NAMES = {"double": "float64", "float": "float32", "__nv_bfloat16": "bfloat16", "__half": "float16"}
_PHASES = {"0": "whole", "1": "sums", "2": "apply"}


class NothingToRead(RuntimeError):
    """No tools, no CUDA code in the library, or none for the architecture."""


# ---- Instructions ----


class Instruction(NamedTuple):
    predicate: str  # "@P0", "@!PT", or ""
    opcode: str
    operands: str

    @property
    def registers(self) -> set[int]:
        """Those that are named, read or written. A wide operand is named by its first."""
        return {int(r) for r in re.findall(r"\bR(\d+)\b", self.operands)}

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def bits(self) -> int:
        return bits_of(self.opcode)

    @property
    def loaded(self) -> set[int]:
        """The registers that a load writes: those named before its address, a 256-bit one's are two."""
        named = [int(r) for r in re.findall(r"\bR(\d+)", re.split(r"desc|\[", self.operands)[0])]
        each = self.bits // 32 // max(len(named), 1)
        return {first + i for first in named for i in range(each)}

    def targets(self) -> list[str]:
        return re.findall(r"\.L_x_\d+", self.operands)


def bits_of(opcode: str) -> int:
    """What a memory access moves for a thread: 32 where the name has no width."""
    widths = re.findall(r"\.(256|128|64|[US]?16|[US]?8)(?=\.|$)", opcode)
    return int(widths[-1].lstrip("US")) if widths else 32


def is_double(opcode: str) -> bool:
    """An fp64 instruction, conversions included."""
    return bool(re.match(r"D(ADD|MUL|FMA|SETP|SET|MNMX)\b", opcode)) or ".F64" in opcode or "64H" in opcode


GLOBAL_LOADS = frozenset({"LDG", "LDGSTS", "UBLKCP"})
GLOBAL_STORES = frozenset({"STG"})
ATOMICS = frozenset({"RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS"})
SPILLS = frozenset({"LDL", "STL"})
SUMS = frozenset({"SHFL", "BAR", "UCGABAR_ARV"})  # a row's threads meet
MEMORY = GLOBAL_LOADS | GLOBAL_STORES | ATOMICS | SPILLS | {"LD", "ST", "LDS", "STS"}


@dataclass
class Block:
    """Instructions that run one after another."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    function: int = 0  # 0: the kernel; else one that it calls


@dataclass
class Kernel:
    """A function of a cubin: what its name says, what it uses, and its code."""

    symbol: str
    signature: str
    cubin: str
    registers: int
    stack: int
    local: int
    static_shared: int
    code: str = field(repr=False)
    family: str = ""  # forward, backward, reduce; "" where the name is none of ours
    dtype: str = ""
    other: str = ""  # dtype of the output or of grad_output
    adds: bool = False  # the fused residual add: dtype is the residual's, other also the input's
    unit_bytes: int = 0
    residence: str = ""  # forward: registers, shared memory, streaming; of sums: registers, loops
    units: int = 0  # of a thread; 0: a loop
    phase: str = ""  # backward: whole, sums, apply

    @property
    def name(self) -> str:
        """Short: ``forward bfloat16 registers x4``."""
        if not self.family:
            return self.signature
        dtypes = self.dtype + (f"/{self.other}" if self.other not in ("", self.dtype) else "")
        how = self.residence or self.phase
        units = f" x{self.units}" if self.units else ""
        unit = f" ({self.unit_bytes}-byte units)" if self.unit_bytes not in (0, 16) else ""
        add = "add" if self.adds else ""
        return " ".join(filter(None, (add, self.family, dtypes, how))) + units + unit

    @functools.cached_property
    def opcodes(self) -> Counter[str]:
        return Counter(match[2] for match in _LINE.finditer(self.code))

    @property
    def blocks(self) -> list[Block]:
        return _blocks(self.code)  # large, and not kept

    @property
    def is_empty(self) -> bool:
        """The kernel of another architecture's unit size: it touches no memory."""
        return self.count(MEMORY) == 0

    def count(self, bases: frozenset[str]) -> int:
        return sum(n for opcode, n in self.opcodes.items() if opcode.split(".", 1)[0] in bases)

    def widths(self, bases: frozenset[str]) -> Counter[int]:
        """Instructions by the bits that a thread moves."""
        widths = Counter[int]()
        for opcode, n in self.opcodes.items():
            if opcode.split(".", 1)[0] in bases:
                widths[bits_of(opcode)] += n
        return widths

    @functools.cached_property
    def barriers(self) -> int:
        """Those that a block claims: all 16 where one is named at run time."""
        named = re.findall(r" BAR\.\S+ (R\d+|0x[0-9a-f]+)", self.code)
        return 16 if any(n[0] == "R" for n in named) else 1 + max((int(n, 16) for n in named), default=0)

    @functools.cached_property
    def loads_together(self) -> int:
        """Wide loads of the input that are outstanding together; see input_loads."""
        return input_loads(self.blocks, 8 * min(16, self.input_chunk or 16))

    @functools.cached_property
    def double_on_the_way(self) -> list[str] | None:
        return least_double(self)

    @property
    def input_chunk(self) -> int:
        """Bytes of the input in a unit; 0 where the name says none."""
        return self.unit_bytes * SIZE[self.dtype] // self._widest if self.unit_bytes else 0

    @property
    def other_chunk(self) -> int:
        return self.unit_bytes * SIZE[self.other] // self._widest if self.unit_bytes else 0

    @property
    def _widest(self) -> int:
        return max(SIZE[self.dtype], SIZE[self.other])


_LINE = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?:(@!?U?P\w+) +)?([A-Z][\w.]*) *([^;\n]*)", re.M)
_ENDS = frozenset({"BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "WARPSYNC", "BREAK", "JMX"})


def _blocks(code: str) -> list[Block]:
    """The control flow of a kernel and of the functions that lie in its section.

    A call is taken as an instruction like others; BSYNC goes on with what follows it, as in all code of
    ptxas that was looked at.
    """
    blocks, labels, falls = [Block()], {}, [True]
    function = 0

    def start() -> None:
        if blocks[-1].instructions:
            blocks.append(Block(function=function))
            falls.append(True)

    for line in code.splitlines():
        if line.startswith((".L_x_", "$")):
            if line.startswith("$"):
                function += 1
            start()
            blocks[-1].function = function
            labels[line.split(":")[0]] = len(blocks) - 1
            continue
        match = _LINE.match(line)
        if not match:
            continue
        instruction = Instruction(match[1] or "", sys.intern(match[2]), match[3].strip())
        blocks[-1].instructions.append(instruction)
        if instruction.base in _ENDS and instruction.base != "CALL":
            goes_on = bool(instruction.predicate) and instruction.predicate != "@PT"
            divides = instruction.opcode.startswith(("BRA.DIV", "WARPSYNC"))
            falls[-1] = goes_on or divides or bool(re.match(r"!?U?P\d", instruction.operands))
            start()
    for i, block in enumerate(blocks):
        if not block.instructions:
            continue
        last = block.instructions[-1]
        if last.base in _ENDS:
            block.successors += [labels[t] for t in last.targets() if t in labels]
        if falls[i] and i + 1 < len(blocks) and blocks[i + 1].function == block.function:
            block.successors.append(i + 1)
    return blocks


def straight_loads(instructions: Iterable[Instruction], bits: int = 128) -> int:
    """The most global loads of `bits` or more in one straight run before the first use of any of them.

    Sound: whatever reads a loaded register names a register in the range that the load wrote.
    """
    most, loads, outstanding = 0, 0, set[int]()
    for instruction in instructions:
        if instruction.registers & outstanding:
            loads, outstanding = 0, set()
        if instruction.base == "LDG" and instruction.bits >= bits:
            outstanding |= instruction.loaded
            loads += 1
            most = max(most, loads)
    return most


def straight_on(blocks: Sequence[Block], start: int, most_blocks: int = 12) -> Iterator[Instruction]:
    """The code from a block on with no conditional branch taken: what a thread with a full row runs."""
    at: int | None = start
    for _ in range(most_blocks):
        if at is None:
            return
        yield from blocks[at].instructions
        # Where it falls through, that is the last of the successors; else the only one is jumped to.
        at = blocks[at].successors[-1] if blocks[at].successors else None


def before_sums(blocks: Sequence[Block]) -> Iterator[int]:
    """Blocks that are reached from the start without passing a sum over lanes, and that load."""
    seen, todo = {0}, [0]
    while todo:
        at = todo.pop()
        if any(i.base == "LDG" for i in blocks[at].instructions):
            yield at
        if not any(i.base in SUMS for i in blocks[at].instructions):
            todo += [s for s in blocks[at].successors if s not in seen]
            seen.update(blocks[at].successors)


def input_loads(blocks: Sequence[Block], bits: int = 128) -> int:
    """straight_loads from the blocks on that come before the first sum over lanes: loads of the input.

    Up to 2 may be the two chunks that cover one unit of a row that does not start on a chunk.
    """
    runs = (
        itertools.takewhile(lambda i: i.base not in SUMS, straight_on(blocks, b)) for b in before_sums(blocks)
    )
    return max((straight_loads(run, bits) for run in runs), default=0)


def least_double(kernel: Kernel) -> list[str] | None:
    """The fp64 instructions on the way through a row that has fewest: load, sum, store.

    What only an extreme row needs is not on it. None: no such way was found.
    """
    blocks = kernel.blocks
    wide = 128 if any(bits >= 128 for bits in kernel.widths(GLOBAL_STORES)) else 0
    if kernel.adds and kernel.family == "forward":  # the sum is stored before the row's sums are known
        wide = min(wide, 8 * kernel.other_chunk)
    waypoints = [frozenset({"DEPBAR"}) if kernel.family == "backward" else GLOBAL_LOADS]
    if any(opcode.startswith("SHFL.BFLY") for opcode in kernel.opcodes):
        waypoints.append(frozenset({"SHFL"}))
    waypoints.append(GLOBAL_STORES)
    cost = [[i.opcode for i in b.instructions if is_double(i.opcode)] for b in blocks]

    def passed(at: int, waypoint: int) -> int:
        for i in blocks[at].instructions:
            last = waypoint == len(waypoints) - 1
            if waypoint < len(waypoints) and i.base in waypoints[waypoint] and (not last or i.bits >= wide):
                waypoint += 1
        return waypoint

    done = set[tuple[int, int]]()
    todo: list[tuple[int, int, int, int, list[str]]] = [(len(cost[0]), 0, 0, 0, cost[0])]
    order = itertools.count(1)
    while todo:
        _, _, at, waypoint, way = heapq.heappop(todo)
        if (at, waypoint) in done:
            continue
        done.add((at, waypoint))
        waypoint = passed(at, waypoint)
        if waypoint == len(waypoints):
            return way
        for s in blocks[at].successors:
            longer = way + cost[s]
            heapq.heappush(todo, (len(longer), next(order), s, waypoint, longer))
    return None


# ---- What is wrong with a kernel ----


def faults(kernel: Kernel) -> list[str]:
    """Stack, local memory, spills, atomics; fp64 on the way of an ordinary row of another dtype.

    Conversions to fp32 are no fault: eps and the weight's offset are doubles among the arguments.
    """
    found = [f"{name} {n}" for name, n in (("stack", kernel.stack), ("local", kernel.local)) if n]
    for what, bases in (("spills", SPILLS), ("atomics", ATOMICS)):
        if n := kernel.count(bases):
            found.append(f"{n} {what}")
    if kernel.dtype != "float64" and not kernel.is_empty and any(map(is_double, kernel.opcodes)):
        way = kernel.double_on_the_way
        if way is None:
            found.append("no way found from a load to a store")
        elif double := sorted(set(way) - {"F2F.F32.F64"}):
            found.append(f"fp64 in an ordinary row: {', '.join(double)}")
    return found


def narrow(kernel: Kernel, loads: int = 0, stores: int = 0) -> list[str]:
    """Accesses of full width that the kernel lacks, by its units or by the bits that are given."""
    base = frozenset({"LDG"})
    if kernel.family == "backward" or kernel.residence == "shared memory":
        base = frozenset({"LDGSTS"})  # 128 bits at most
    most = 8 * (kernel.unit_bytes if base == {"LDG"} else 16)
    loads = loads or min(8 * kernel.input_chunk, most)
    if not stores and kernel.phase != "sums":
        stores = 8 * (kernel.input_chunk if kernel.family == "backward" else kernel.other_chunk)
    found = []
    for what, bases, bits in (("loads", base, loads), ("stores", GLOBAL_STORES, stores)):
        if bits and bits not in (widths := kernel.widths(bases)):
            found.append(f"no {bits}-bit {what}: {dict(widths)}")
    return found


# ---- Reading a library ----


@functools.cache
def tool(name: str) -> str:
    """The path of cuobjdump or nvdisasm."""
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "backends/nvidia/bin" / name
        if path.exists():
            return str(path)
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if not found:
        raise NothingToRead(f"no {name}: neither a Triton wheel nor a CUDA toolkit has it here")
    return found


def _output(*command: str | Path, cwd: str | None = None) -> str:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if ran.returncode != 0:
        raise NothingToRead(f"{' '.join(map(str, command))}: {ran.stderr.strip()}")
    return ran.stdout


def demangle(symbol: str) -> str:
    """By the C++ runtime that torch loads: no c++filt needed."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    function = runtime["__cxa_demangle"]
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = function(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    result = ctypes.string_at(text).decode()
    runtime.free(ctypes.c_void_p(text))
    return result


def installed_library() -> Path:
    """libfusednorm.so of the package that is imported."""
    import fusednorm

    if fusednorm.build_info()["cuda"] is None:
        raise NothingToRead("this build of fusednorm has no CUDA code")
    return Path(fusednorm.__file__).parent / "lib/libfusednorm.so"


def architectures(library: Path) -> list[int]:
    """Those that the library has machine code for."""
    names = re.findall(r"\.sm_(\d+)[af]?\.cubin", _output(tool("cuobjdump"), "--list-elf", library))
    return sorted({int(name) for name in names})


def describe(kernel: Kernel) -> Kernel:
    """Fills in what the name says."""
    text = re.sub(r"\(fusednorm::cuda::Phase\)|fusednorm::(cuda::)?", "", kernel.signature)
    match = re.match(r"void (\w+)<(.*)>\(.*\)$", text)
    if not match:
        return kernel
    arguments = [a.strip() for a in re.split(r"[,<>]", match[2]) if a.strip()]
    if match[1] == "reduce_partials":
        kernel.family, kernel.dtype = "reduce", _NAMES[arguments[0]]
    elif match[1] in ("row_norm_forward", "row_norm_backward"):
        kernel.family = match[1][9:]
        kernel.dtype, kernel.other = _NAMES[arguments[0]], _NAMES[arguments[1]]
        if kernel.family == "backward":
            kernel.unit_bytes, kernel.units, kernel.phase = 16, int(arguments[2]), _PHASES[arguments[3]]
            kernel.adds = "SplitStore" in arguments
        elif arguments[3].startswith("Add"):
            kernel.adds, kernel.unit_bytes = True, int(arguments[2])
            kernel.residence = "registers" if arguments[3] == "AddRegisterRow" else "loops"
            kernel.units = int(arguments[7]) if kernel.residence == "registers" else 0
        else:
            kernel.unit_bytes = int(arguments[2])
            if arguments[3] == "RegisterRow":
                kernel.residence, kernel.units = "registers", int(arguments[6])
            else:
                kernel.residence = "shared memory" if arguments[6] == "true" else "streaming"
    return kernel


def read_cubin(cubin: Path) -> list[Kernel]:
    """The kernels of a cubin."""
    resources = {}
    usage = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
    for symbol, *numbers in usage.findall(_output(tool("cuobjdump"), "--dump-resource-usage", cubin)):
        resources[symbol] = [int(n) for n in numbers]
    sections = re.split(r"^//-+ \.text\.(\S+)\s+-+$", _output(tool("nvdisasm"), "-c", cubin), flags=re.M)
    if set(sections[1::2]) != set(resources):
        raise NothingToRead(f"{cubin.name}: nvdisasm and cuobjdump name different functions")
    kernels = []
    for symbol, code in zip(sections[1::2], sections[2::2], strict=True):
        registers, stack, shared, local = resources[symbol]
        kernel = Kernel(symbol, demangle(symbol), cubin.name, registers, stack, local, shared, code)
        kernels.append(describe(kernel))
    return kernels


@functools.cache
def read_library(library: Path, arch: int) -> list[Kernel]:
    """All kernels that the library has machine code of for the architecture; read once."""
    if arch not in (there := architectures(library)):
        raise NothingToRead(f"{library.name} has machine code for {there}, not for {arch}")
    with tempfile.TemporaryDirectory() as folder:
        _output(tool("cuobjdump"), "--extract-elf", "all", library, cwd=folder)
        cubins = sorted(p for p in Path(folder).iterdir() if re.search(rf"\.sm_{arch}[af]?\.cubin$", p.name))
        with ThreadPoolExecutor(2) as pool:
            return [kernel for kernels in pool.map(read_cubin, cubins) for kernel in kernels]


# ---- Plans ----


@dataclass(frozen=True)
class Sm:
    """What an SM has; as launch_config.h's architecture(), written again on purpose."""

    shared: int
    threads: int
    blocks: int = 32
    registers: int = 65536
    partitions: int = 4
    barriers: int = 64


def sm_of(arch: int) -> Sm:
    if arch in (80, 87):
        return Sm(164 * 1024, 2048)
    if 90 <= arch < 120:
        return Sm(228 * 1024, 2048)
    return Sm(100 * 1024, 1536, blocks := 24 if arch >= 89 else 16, barriers=blocks)


def blocks_per_sm(threads: int, registers: int, shared_bytes: int, sm: Sm, barriers: int = 1) -> int:
    """As cuda_occupancy.h: a warp's registers come from a quarter of the SM, 256 at a time."""
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = sm.registers // sm.partitions // of_a_warp * sm.partitions // warps
    by_shared = sm.shared // (-(-(shared_bytes + 1024) // 128) * 128)  # 1 KB a block is the system's
    return min(sm.threads // 32 // warps, by_registers, by_shared, sm.blocks, sm.barriers // barriers)


@dataclass
class Entry:
    """A plan and the kernel that it launches."""

    direction: str
    norm: str
    dtype: str
    other: str
    cols: int
    kernel: str
    kernels: list[Kernel] = field(repr=False)  # one, or the two launches of a row beyond all clusters
    registers: int
    max_registers: int
    stack: int
    local: int
    threads: int
    rows_per_block: int
    cluster: int
    shared_bytes: int
    blocks_per_sm: int
    assumed_blocks: int  # by the plan's formula
    load_bits: int
    store_bits: int
    loads: int  # a thread's, together on their way
    bytes_in_flight: int  # on an SM: what rows of this length ask for, idle lanes not counted
    plan_bytes: int  # the plan's own number: every lane counted
    partial_share: float | None = None
    quantisation_loss: dict[int, float] | None = None

    @property
    def why(self) -> str:
        """Why less than BYTES_IN_FLIGHT, where it is less."""
        if self.bytes_in_flight >= BYTES_IN_FLIGHT:
            return ""
        if self.blocks_per_sm < self.assumed_blocks:
            return f"{self.blocks_per_sm} blocks on an SM, not {self.assumed_blocks}"
        row = self.cols * SIZE[self.dtype]
        if self.direction == "forward" and row < 1024:
            return (
                f"rows of {row} bytes: a thread holds one unit, {self.blocks_per_sm * self.threads} threads"
            )
        if self.direction == "backward" and row < 1024:
            return f"rows of {row} bytes: the ring holds 4 stages at most"
        if self.kernel == "streaming":
            return f"{self.loads} load of a thread at a time, the plan counts 4: branches lie between them"
        return f"idle lanes: the plan counts {self.plan_bytes:,}"


def _widest(kernels: Sequence[Kernel], bases: frozenset[str]) -> int:
    return max((bits for k in kernels for bits in k.widths(bases)), default=0)


class Code:
    """The kernels of an architecture, by what a plan asks for."""

    def __init__(self, library: Path, arch: int) -> None:
        self.arch, self.sm = arch, sm_of(arch)
        self.kernels = read_library(library, arch)
        self.by_plan = {
            (k.family, k.dtype, k.other, k.residence or k.phase, k.units, k.unit_bytes): k
            for k in self.kernels
            if k.family in ("forward", "backward") and not k.adds
        }

    def entry(
        self, direction: str, norm: str, dtype: str, cols: int, other: str = "", rows: int = 0
    ) -> Entry:
        """`rows`: as many as make ELEMENTS, unless said."""
        import fusednorm

        other, rows = other or dtype, rows or max(1, ELEMENTS // cols)
        plan = fusednorm._C.explain(rows, cols, dtype, other, norm, self.arch)[direction]
        forward = direction == "forward"
        loops = forward and plan["kernel"] != "registers"
        phases = ["whole"] if forward or plan["launches"] == 1 else ["sums", "apply"]
        parts = [plan["kernel"]] if forward else phases
        units = 0 if loops else plan["units"]
        kernels = [self.by_plan[direction, dtype, other, part, units, plan["unit_bytes"]] for part in parts]
        registers = max(k.registers for k in kernels)
        blocks = blocks_per_sm(
            plan["threads"], registers, plan["shared_bytes"], self.sm, max(k.barriers for k in kernels)
        )
        loads_of = GLOBAL_LOADS if forward else frozenset({"LDGSTS"})
        row = cols * (SIZE[dtype] + (0 if forward else SIZE[other]))
        if forward:
            chunk = plan["columns"] * SIZE[dtype]
            loads = plan["units"] if parts != ["streaming"] else 4
            of_block = row * plan["rows_per_block"] // plan["cluster"]
            if parts != ["shared memory"]:
                together = kernels[0].loads_together
                # In a loop 2 are taken for the two chunks that cover one unit.
                loads = 1 if loops and together <= 2 else min(loads, together)
                of_block = min(of_block, loads * chunk * plan["threads"])
        else:
            loads = (plan["stages"] - 1) * plan["units"] * 2
            of_block = (plan["stages"] - 1) * row * plan["rows_per_block"] // plan["blocks_per_row"]
        losses = None
        if not forward:
            losses = {s: fusednorm._C.quantisation_loss(plan["blocks"], s) for s in (108, 132, 148, 170)}
        return Entry(
            direction,
            norm,
            dtype,
            other,
            cols,
            " + ".join(parts) + (f" x{units}" if units else ""),
            kernels,
            registers,
            plan["max_registers"],
            max(k.stack for k in kernels),
            max(k.local for k in kernels),
            plan["threads"],
            plan["rows_per_block"],
            plan["cluster"],
            plan["shared_bytes"],
            blocks,
            plan["blocks_per_sm"],
            _widest(kernels, loads_of),
            _widest(kernels, GLOBAL_STORES),
            loads,
            blocks * of_block,
            plan["bytes_in_flight"],
            plan.get("partial_share"),
            losses,
        )

    def table(self) -> list[Entry]:
        return [
            self.entry(direction, norm, dtype, cols)
            for direction in ("forward", "backward")
            for norm in NORMS
            for dtype in DTYPES
            for cols in COLUMNS
        ]


def markdown(entries: Sequence[Entry], arch: int) -> str:
    lines = [
        f"sm_{arch}; rows such that a tensor has 2^28 elements. Idle: share of SM time lost because blocks "
        "do not divide among 108 / 132 / 148 / 170 SMs.",
        "",
        "| | norm | dtype | N | kernel | registers | threads | rows a block | cluster | blocks an SM "
        "| load | KB in flight | partial sums | idle | below 32 KB because |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for e in entries:
        idle = (
            " / ".join(f"{100 * v:.0f}" for v in e.quantisation_loss.values()) + " %"
            if e.quantisation_loss
            else ""
        )
        share = f"{e.partial_share:.1%}" if e.partial_share is not None else ""
        cells = (
            e.direction,
            e.norm,
            e.dtype,
            e.cols,
            e.kernel,
            e.registers,
            e.threads,
            e.rows_per_block,
            e.cluster,
            e.blocks_per_sm,
            f"{e.loads} x {e.load_bits}",
            f"{e.bytes_in_flight / 1024:.0f}",
            share,
            idle,
            e.why,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, help="of the machine code; the first in the library")
    parser.add_argument("--library", type=Path, help="the installed one")
    parser.add_argument("--markdown", action="store_true", help="print the table (also without --json)")
    parser.add_argument("--json", type=Path, help="write the table, and what each kernel has, to this file")
    arguments = parser.parse_args()
    try:
        library = arguments.library or installed_library()
        there = architectures(library)
        if not there:
            raise NothingToRead(f"{library} has no machine code")
        code = Code(library, arguments.arch or there[0])
    except NothingToRead as nothing:
        print(f"cuda_code: {nothing}", file=sys.stderr)
        return 2
    entries = code.table()
    if arguments.markdown or not arguments.json:
        print(markdown(entries, code.arch))
    if arguments.json:
        kernels = [
            {
                "name": k.name,
                "signature": k.signature,
                "registers": k.registers,
                "stack": k.stack,
                "local": k.local,
                "instructions": k.opcodes.total(),
                "loads": k.widths(GLOBAL_LOADS),
                "stores": k.widths(GLOBAL_STORES),
                "double": sum(n for opcode, n in k.opcodes.items() if is_double(opcode)),
                "empty": k.is_empty,
            }
            for k in code.kernels
        ]
        plans = [{k: v for k, v in e.__dict__.items() if k != "kernels"} for e in entries]
        arguments.json.write_text(
            json.dumps({"arch": code.arch, "plans": plans, "kernels": kernels}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
