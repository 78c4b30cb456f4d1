"""What the benchmark measures, as data; the least bytes of a case; and the command line that picks cases."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

Shape = tuple[int, int]

BENCH_DIR = Path(__file__).resolve().parents[1] / "build" / "bench"

# Rows x columns: from a batch that lives in the cache to one that no cache holds.
DEFAULT_SHAPES: tuple[Shape, ...] = ((256, 768), (2048, 768), (512, 4096), (8192, 4096))
# A pass of eager RMSNorm over 8192x4096 alone takes about half a second.
QUICK_SHAPES: tuple[Shape, ...] = DEFAULT_SHAPES[:-1]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DEFAULT_DTYPES: tuple[str, ...] = ("fp32", "bf16")

# The title of each norm, and how many parameters of one row's length it has.
NORM_TITLES: dict[str, str] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
NORM_PARAMETERS: dict[str, int] = {"layer_norm": 2, "rms_norm": 1}

FORWARD = "forward"
FORWARD_BACKWARD = "fwd+bwd"
DIRECTIONS: tuple[str, ...] = (FORWARD, FORWARD_BACKWARD)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark's table."""

    norm: str
    rows: int
    cols: int
    dtype: str
    direction: str
    threads: int

    @property
    def backward(self) -> bool:
        """Whether the case takes gradients too."""
        return self.direction == FORWARD_BACKWARD

    def __str__(self) -> str:
        where = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{NORM_TITLES[self.norm]} {self.rows}x{self.cols} {self.dtype} {self.direction}, {where}"


def cases(
    norms: Iterable[str], shapes: Iterable[Shape], dtypes: Iterable[str], threads: Iterable[int]
) -> Iterator[Case]:
    """Every combination; neighbours share their inputs, so that the inputs are made once."""
    for norm, dtype, (rows, cols), direction, count in itertools.product(
        norms, dtypes, shapes, DIRECTIONS, threads
    ):
        yield Case(norm, rows, cols, dtype, direction, count)


def least_bytes(case: Case) -> int:
    """The bytes that a case must move at least, whoever computes it.

    Forward reads x and the parameters and writes y. Backward reads x, the gradient and the weight, and writes
    the gradients of x and of the parameters. Statistics do not count: they can be computed again.
    """
    element = DTYPES[case.dtype].itemsize
    matrix, row = case.rows * case.cols * element, case.cols * element
    parameters = NORM_PARAMETERS[case.norm]
    forward = 2 * matrix + parameters * row
    backward = 3 * matrix + (1 + parameters) * row
    return forward + (backward if case.backward else 0)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """``256x768,2048x768`` from the command line."""
    shapes = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", item.strip())
        if not match:
            raise argparse.ArgumentTypeError(f"{item!r} is no shape: expected ROWSxCOLUMNS, as 256x768")
        shapes.append((int(match[1]), int(match[2])))
    return tuple(dict.fromkeys(shapes))


def parse_threads(text: str) -> tuple[int, ...]:
    """``1,2`` from the command line. More threads than processors would time the scheduler."""
    processors = os.cpu_count() or 1
    for item in text.split(","):
        if not item.strip().isdecimal() or not 1 <= int(item) <= processors:
            raise argparse.ArgumentTypeError(f"{item!r} is no thread count from 1 to {processors}")
    return tuple(sorted({int(item) for item in text.split(",")}))


def names_parser(allowed: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of names with commas between them, all of them among the allowed ones."""

    def parse(text: str) -> tuple[str, ...]:
        names = [item.strip() for item in text.split(",")]
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return tuple(dict.fromkeys(names))

    return parse


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line, with the shapes filled in and a stored run read. The description keeps its lines."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = torch.get_num_threads()
    add = parser.add_argument
    add(
        "--shapes",
        type=parse_shapes,
        metavar="MxN,...",
        help="rows x columns; default: the list in shapes.py",
    )
    add(
        "--dtypes",
        type=names_parser(DTYPES),
        default=DEFAULT_DTYPES,
        metavar="DTYPE,...",
        help=", ".join(DTYPES),
    )
    add(
        "--threads",
        type=parse_threads,
        default=tuple(sorted({1, everything})),
        metavar="T,...",
        help="default: 1 and all of torch's",
    )
    add(
        "--norms",
        type=names_parser(NORM_TITLES),
        default=tuple(NORM_TITLES),
        metavar="NORM,...",
        help=", ".join(NORM_TITLES),
    )
    add("--quick", action="store_true", help="under a minute: less time a case, and not the largest shape")
    add("--compile", action="store_true", help="time torch.compile of eager's call too (takes long)")
    add(
        "--out",
        type=Path,
        default=BENCH_DIR,
        metavar="DIR",
        help="for norms.json and norms.png",
    )
    add("--default-malloc", action="store_true", help="let malloc return freed memory: times page faults too")
    add("--markdown", action="store_true", help="print the README's tables in place of the plain one")
    add("--from-json", type=Path, metavar="FILE", help="with --markdown: print a stored run, measure nothing")
    args = parser.parse_args()
    args.shapes = args.shapes or (QUICK_SHAPES if args.quick else DEFAULT_SHAPES)
    if args.from_json:
        if not args.markdown:
            parser.error("--from-json needs --markdown")
        try:
            args.stored = json.loads(args.from_json.read_text())
            missing = {"cpu", "torch", "date", "keeps_memory", "results"} - set(args.stored)
            if missing:
                raise LookupError(f"no {', '.join(sorted(missing))}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"--from-json: {args.from_json} is no stored run: {error!r}")
    return args
