"""Writes the tables of benchmarks/README.md from what the benchmarks left.

    python benchmarks/tables.py [--check] [NAME ...]

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. ``--check`` writes nothing. It fails
where a table is not what would be written. Without a name: the tables whose JSON is in the repository. Others
are of a run of ``make bench``, which may be a quick one: they are written when they are named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"

TITLES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def instructions(stored: dict[str, Any]) -> str:
    """Instructions for each element: a row for each instruction set, norm and shape."""
    cells: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    for name, count in stored["instructions"].items():
        isa, norm, shape, dtype, direction = name.split()
        rows, cols = map(int, shape.split("x"))
        cells.setdefault((isa, norm, shape), {})[dtype, direction] = count / (rows * cols)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = ["| kernels | norm | shape | " + " | ".join(map(" ".join, columns)) + " |"]
    lines += ["|---|---|---|" + "---:|" * len(columns)]
    for (isa, norm, shape), row in cells.items():
        numbers = " | ".join(f"{row[c]:.2f}" if c in row else "" for c in columns)
        lines.append(f"| {isa} | {TITLES[norm]} | {shape} | {numbers} |")
    return "\n".join(lines)


def bars(run: dict[str, Any]) -> str:
    """The bars of a run, with the machine and the date."""
    import machine  # these import torch and fusednorm, which a check of the other tables can do without
    from bars import all_bars, bars_markdown

    return f"{bars_markdown(all_bars(run))}\n\n{machine.sentence(run['machine'])}, {run['date'][:10]}."


def norms(run: dict[str, Any]) -> str:
    """Times at the bars' shapes, with the machine and the date."""
    from report import markdown

    return markdown(run)


# Name of a table: the file that a benchmark leaves, and what makes the table of it.
SOURCES: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "instructions": (HERE / "instructions.json", instructions),
    "bars": (HERE.parent / "build/bench/norms.json", bars),
    "norms": (HERE.parent / "build/bench/norms.json", norms),
}


def between(name: str) -> re.Pattern[str]:
    """A table with its markers."""
    return re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)


def with_table(page: str, name: str, table: str) -> str:
    """The page with another table of that name."""
    replaced, count = between(name).subn(lambda found: f"{found[1]}{table}\n{found[2]}", page)
    if count != 1:
        raise SystemExit(f"tables.py: {name}: expected its markers once on the page, found {count} of them")
    return replaced


def main(arguments: Sequence[str] | None = None) -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is stale")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that has the tables")
    parser.add_argument("--from-json", type=Path, help="read this file in place of the tables' own")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in SOURCES]:
        parser.error(f"no table {unknown[0]}: there are {', '.join(SOURCES)}")
    page = before = args.page.read_text(encoding="utf-8")
    stale = []
    kept = [name for name, (path, _) in SOURCES.items() if path.parent == HERE]
    for name in args.names or kept:
        path, make = SOURCES[name]
        path = args.from_json or path
        if not path.exists():
            raise SystemExit(f"tables.py: {name}: there is no {path}: its benchmark writes it")
        changed = with_table(page, name, make(json.loads(path.read_text(encoding="utf-8"))))
        stale += [name] * (changed != page)
        page = changed
    if args.check:
        for name in stale:
            print(f"{args.page}: {name} is stale: run benchmarks/tables.py {name}", file=sys.stderr)
        return int(bool(stale))
    if page != before:
        args.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
