"""The command line of bench_norms.py, and the cases it picks."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shapes import (
    ALL_TITLES,
    DIRECTIONS,
    DTYPES,
    FRESH,
    KEPT,
    MODULE_DIRECTIONS,
    NORM_TITLES,
    Case,
    Shape,
    full_sweep,
    product,
    quick_sweep,
)

BUILD_DIR = Path(__file__).resolve().parents[1] / "build"


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


def parse_filter(text: str) -> re.Pattern[str]:
    """A regular expression, for cases as they are printed."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def other_instruction_sets() -> tuple[str, ...]:
    """Those narrower than the one in use that are worth a line: AVX2 on an AVX-512 machine."""
    return ("avx2",) if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else ()


def picked_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    if args.shapes:
        norms, dtypes = args.norms or tuple(NORM_TITLES), args.dtypes or ("fp32", "bf16")
        found = list(product(norms, args.shapes, dtypes, args.directions or DIRECTIONS, args.threads))
    else:
        found = (quick_sweep if args.quick else full_sweep)(args.threads, other_instruction_sets())
    for name, wanted in (("norm", args.norms), ("dtype", args.dtypes), ("direction", args.directions)):
        found = [c for c in found if not wanted or getattr(c, name) in wanted]
    found = [c for c in found if c.norm in NORM_TITLES or c.direction not in MODULE_DIRECTIONS]
    found = [c for c in found if args.filter.search(str(c))]
    if args.default_malloc:
        found = list(dict.fromkeys(replace(c, memory=FRESH) for c in found))
    # What shares inputs comes together, whichever list it came from.
    return sorted(
        found, key=lambda c: (c.isa, c.memory != KEPT, c.norm, c.dtype, c.rows * c.cols, c.cols, c.threads)
    )


def parse_arguments(description: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the cases picked or a stored run read. The description keeps its lines."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = torch.get_num_threads()
    add = parser.add_argument
    add(
        "--filter",
        type=parse_filter,
        default=re.compile(""),
        metavar="REGEX",
        help="only cases that it finds, as '^RMSNorm 512x4096 bf16 fwd.bwd, 1'; --list prints them",
    )
    add("--list", action="store_true", help="print the cases and measure nothing")
    add(
        "--shapes",
        type=parse_shapes,
        metavar="MxN,...",
        help="rows x columns, in all dtypes and directions asked for; default: the sweep in shapes.py",
    )
    add("--dtypes", type=names_parser(DTYPES), metavar="DTYPE,...", help=", ".join(DTYPES))
    add(
        "--threads",
        type=parse_threads,
        default=tuple(sorted({1, everything})),
        metavar="T,...",
        help="default: 1 and all of torch's",
    )
    add("--norms", type=names_parser(ALL_TITLES), metavar="NORM,...", help=", ".join(ALL_TITLES))
    add(
        "--directions",
        type=names_parser((*DIRECTIONS, *MODULE_DIRECTIONS)),
        metavar="DIRECTION,...",
        help=", ".join((*DIRECTIONS, *MODULE_DIRECTIONS)),
    )
    add("--quick", action="store_true", help="under 2 minutes: fewer cases, less time for each, no compile")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time torch.compile too, at the bar shapes (default: unless --quick)",
    )
    add(
        "--out", type=Path, default=BUILD_DIR / "bench", metavar="DIR", help="for norms.json and the pictures"
    )
    add(
        "--programs",
        type=Path,
        default=BUILD_DIR / "cmake",
        metavar="DIR",
        help="where bench_small_calls was built",
    )
    add("--default-malloc", action="store_true", help="let malloc return freed memory: times page faults too")
    add("--markdown", action="store_true", help="print README.md's tables in place of the plain one")
    add("--from-json", type=Path, metavar="FILE", help="with --markdown: print a stored run, measure nothing")
    args = parser.parse_args(arguments)
    if args.compile is None:
        args.compile = not args.quick
    args.cases = picked_cases(args)
    if args.from_json:
        if not args.markdown:
            parser.error("--from-json needs --markdown")
        try:
            args.stored = json.loads(args.from_json.read_text())
            missing = {"cpu", "torch", "date", "machine", "results"} - set(args.stored)
            if missing:
                raise LookupError(f"no {', '.join(sorted(missing))}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"--from-json: {args.from_json} is no stored run: {error!r}")
    elif not args.cases:
        parser.error("no case is left: see --list without the filter")
    return args
