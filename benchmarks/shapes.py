"""What the benchmark measures, as data: shapes, dtypes, directions, the cases of a run, a case's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, int]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

# The title of each norm, and how many parameters of one row's length it has.
NORM_TITLES: dict[str, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
NORM_PARAMETERS: dict[str, int] = {"layer_norm": 2, "rms_norm": 1, "add_layer_norm": 2, "add_rms_norm": 1}
# The sum of x and a residual, and the norm of it: two outputs.
ADD_TITLES: dict[str, str] = {"add_layer_norm": "add+LayerNorm", "add_rms_norm": "add+RMSNorm"}
ALL_TITLES = NORM_TITLES | ADD_TITLES
BF16_ON_FP32 = "bf16+fp32"  # x and parameters in bf16, the residual in fp32: of the add alone

FORWARD = "forward"  # without grad
FORWARD_GRAPH = "fwd+graph"  # builds a graph for backward and drops it
BACKWARD = "backward"  # alone, over a graph that was built once
FORWARD_BACKWARD = "fwd+bwd"
MODULE_FORWARD = "module"  # a module's call without grad: what a small batch pays beside the kernel
MODULE_FORWARD_BACKWARD = "module fwd+bwd"
DIRECTIONS: tuple[str, ...] = (FORWARD, FORWARD_GRAPH, BACKWARD, FORWARD_BACKWARD)
MODULE_DIRECTIONS: tuple[str, ...] = (MODULE_FORWARD, MODULE_FORWARD_BACKWARD)

# Rows x columns. The bars of speed are for these four; only here is torch.compile worth its time.
BAR_SHAPES: tuple[Shape, ...] = ((256, 768), (2048, 768), (512, 4096), (32, 65536))
BIG_SHAPE: Shape = (8192, 4096)  # no cache holds it
ADD_BAR_SHAPES: tuple[Shape, ...] = ((2048, 768), (512, 4096))  # where the residual add has its bars
SMALL_SHAPES: tuple[Shape, ...] = ((1, 64), (1, 768), (1, 4096), (8, 768), (8, 4096))
OTHER_SHAPES: tuple[Shape, ...] = ((1, 65536), (64, 768), (100000, 32))
WIDTH_ROWS = 4096
WIDTHS: tuple[int, ...] = (1, 3, 33, 127, 257, 1023, 1025)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is n at least."""
    return 1 << (n - 1).bit_length()


WIDTH_SHAPES: tuple[Shape, ...] = tuple((WIDTH_ROWS, w) for w in WIDTHS)
# What a width is compared with: the time of an element there.
REFERENCE_SHAPES: tuple[Shape, ...] = tuple(
    (WIDTH_ROWS, w) for w in sorted({next_power_of_two(w) for w in WIDTHS} - set(WIDTHS))
)

KEPT, FRESH = "kept", "fresh"  # freed memory stays with the process, or malloc does as it likes


@dataclass(frozen=True)
class Case:
    """One line of the benchmark's table."""

    norm: str
    rows: int
    cols: int
    dtype: str
    direction: str
    threads: int
    isa: str = ""  # ATEN_CPU_CAPABILITY; empty: the machine's own
    memory: str = KEPT

    @property
    def shape(self) -> Shape:
        return self.rows, self.cols

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """That of x and the parameters, and that of the residual."""
        first, _, second = self.dtype.partition("+")
        return DTYPES[first], DTYPES[second or first]

    @property
    def grad(self) -> bool:
        """Whether autograd is on."""
        return self.direction not in (FORWARD, MODULE_FORWARD)

    @property
    def backward(self) -> bool:
        """Whether the case takes gradients."""
        return self.direction in (BACKWARD, FORWARD_BACKWARD, MODULE_FORWARD_BACKWARD)

    def __str__(self) -> str:
        where = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        what = f"{ALL_TITLES[self.norm]} {self.rows}x{self.cols} {self.dtype} {self.direction}, {where}"
        return what + f", {self.isa}" * bool(self.isa) + f", {self.memory} memory" * (self.memory != KEPT)


def product(
    norms: Sequence[str],
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    directions: Sequence[str],
    threads: Sequence[int],
    isa: str = "",
    memory: str = KEPT,
) -> Iterator[Case]:
    """Every combination; neighbours share their inputs, so that the inputs are made once."""
    for norm, dtype, shape, count, direction in itertools.product(norms, dtypes, shapes, threads, directions):
        yield Case(norm, *shape, dtype, direction, count, isa, memory)


def full_sweep(threads: Sequence[int], other_isa: Sequence[str]) -> list[Case]:
    """What the issue of the benchmark asks for, within a quarter of an hour.

    More threads only where there are rows for them and work enough to share (all else runs on one anyway).
    The narrower instruction sets run where they differ most: the bar shapes and one odd width.
    """
    norms = tuple(NORM_TITLES)
    one, more = threads[:1], threads[1:]
    large = (*BAR_SHAPES, BIG_SHAPE)
    small = (*SMALL_SHAPES, *OTHER_SHAPES, *WIDTH_SHAPES)
    few = (FORWARD, FORWARD_BACKWARD)
    fp64_shapes = ((1, 768), (2048, 768))
    shared = ((64, 768), (100000, 32), *WIDTH_SHAPES[2:])
    found = [
        *product(norms, large, ("fp32", "bf16"), DIRECTIONS, threads),
        *product(norms, small, ("fp32", "bf16", "fp16"), DIRECTIONS, one),
        *product(norms, large, ("fp16",), DIRECTIONS, one),
        *product(norms, BAR_SHAPES, ("fp16",), few, more),
        *product(norms, shared, ("fp32", "bf16"), few, more),
        *product(norms, fp64_shapes, ("fp64",), DIRECTIONS, one),
        *product(norms, REFERENCE_SHAPES, ("fp32", "bf16"), (FORWARD, BACKWARD), one),
        *product(norms, SMALL_SHAPES, ("fp32", "bf16"), MODULE_DIRECTIONS, one),
        *product(tuple(ADD_TITLES), (*ADD_BAR_SHAPES, BIG_SHAPE), ("fp32", "bf16"), few, one),
        *product(tuple(ADD_TITLES), ADD_BAR_SHAPES[1:], ("fp32", "bf16"), few, more),
        *product(tuple(ADD_TITLES), ADD_BAR_SHAPES[1:], (BF16_ON_FP32,), few, one),
        *product(tuple(ADD_TITLES), BAR_SHAPES, ("fp32",), (FORWARD,), one),  # beside ONNX Runtime
        *product(norms, (BIG_SHAPE,), ("fp32", "bf16"), few, threads, memory=FRESH),
    ]
    for isa in other_isa:
        found += product(norms, (*BAR_SHAPES, (WIDTH_ROWS, 257)), ("fp32", "bf16"), few, threads, isa)
    return list(dict.fromkeys(found))


def quick_sweep(threads: Sequence[int], other_isa: Sequence[str]) -> list[Case]:
    """A part of each kind, enough for a first answer on most bars."""
    norms, few = tuple(NORM_TITLES), (FORWARD, BACKWARD, FORWARD_BACKWARD)
    some_widths = tuple((WIDTH_ROWS, w) for w in (257, 512, 1025, 2048))
    found = [
        *product(norms, BAR_SHAPES, ("fp32", "bf16"), few, threads),
        *product(norms, some_widths, ("fp32",), (FORWARD, BACKWARD), threads[:1]),
        *product(norms, ((1, 64), (1, 768), (8, 4096)), ("fp32",), MODULE_DIRECTIONS, threads[:1]),
        *product(norms, (BIG_SHAPE,), ("bf16",), (FORWARD,), threads[:1], memory=FRESH),
        *product(tuple(ADD_TITLES), ADD_BAR_SHAPES, ("fp32",), (FORWARD, FORWARD_BACKWARD), threads[:1]),
    ]
    for isa in other_isa:
        found += product(norms, BAR_SHAPES[1:2], ("fp32", "bf16"), (FORWARD, FORWARD_BACKWARD), threads, isa)
    return list(dict.fromkeys(found))


def least_bytes(case: Case) -> int:
    """The bytes that a case must move at least, whoever computes it.

    Forward reads x and the parameters and writes y. Backward reads x, the gradient and the weight, and writes
    the gradients of x and of the parameters. Statistics do not count: they can be computed again.
    The add reads the residual and writes the sum besides. Its backward reads the sum in place of x, and its
    gradient; what it writes is the gradient of x and of the residual in one, unless their dtypes differ.
    """
    element, wide = (dtype.itemsize for dtype in case.dtypes)
    elements, row = case.rows * case.cols, case.cols * element
    parameters = NORM_PARAMETERS[case.norm]
    if case.norm in ADD_TITLES:
        forward = 2 * elements * (element + wide)
        backward = elements * (element + 3 * wide + (element if element != wide else 0))
    else:
        forward, backward = 2 * elements * element, 3 * elements * element
    forward, backward = forward + parameters * row, backward + (1 + parameters) * row
    if case.direction == BACKWARD:
        return backward
    return forward + (backward if case.backward else 0)
