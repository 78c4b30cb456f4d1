"""A table of the whole family of norms: what tests show of each, counted from the results of running them.

``family.py`` runs the tests that family_rows.py names, on the CPU's kernels and, with --simt LIBRARY
(FUSEDNORM_SIMT_LIBRARY), on the CUDA kernels, which the host executes; ``family.py RESULTS.xml ...`` reads
what earlier runs of pytest wrote with --junitxml. On the CUDA kernels a test shows something only if it
launched one, which conftest.py records. Exits with 1 if a test failed or a row names one that is not there.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from family_rows import ROWS, Row

TESTS = Path(__file__).resolve().parent
NOT_RUN, NO_TEST, NO_KERNEL, NOTHING = "not run", "no test", "no kernel ran", "—"


@dataclass(frozen=True)
class Result:
    """One test as it was run; ``launches`` of CUDA kernels, or None where the CPU's own ran."""

    file: str
    name: str  # without test_ and id; empty: the file could not be imported
    id: str  # of its parameters
    outcome: str  # passed, failed, skipped
    launches: int | None


def read(paths: Iterable[Path]) -> list[Result]:
    """The results in pytest's junit files. Of a test that is there twice, with the same kernels, the last."""
    found: dict[tuple[str, str, bool], Result] = {}
    for path in paths:
        failed = set()  # an error in teardown is an entry of its own
        for entry in ElementTree.parse(path).iter("testcase"):
            module, name = entry.get("classname", ""), entry.get("name", "")
            module, name = (module, name) if module else (name, "")
            file = module.rpartition(".")[2].removeprefix("test_")
            name, _, parameters = name.removeprefix("test_").removesuffix("]").partition("[")
            outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
            outcome = next((outcomes[e.tag] for e in entry if e.tag in outcomes), "passed")
            launches = entry.find("properties/property[@name='launches']")
            count = None if launches is None else int(launches.get("value", 0))
            key = file, entry.get("name", ""), count is not None
            failed |= {key} if outcome == "failed" else set()
            found[key] = Result(file, name, parameters, "failed" if key in failed else outcome, count)
    return list(found.values())


def split(selector: str) -> tuple[str, str, str]:
    """The file, the name and the word of ``file::name[word]``."""
    file, _, rest = selector.partition("::")
    name, _, word = rest.partition("[")
    return file, name, word.removesuffix("]")


def source_of(file: str, tests: Path = TESTS) -> Path | None:
    """The file of that name in whichever room it lies."""
    return next(tests.rglob(f"test_{file}.py"), None)


def names_in(selector: str, tests: Path = TESTS) -> list[str]:
    """The names of the test functions that a selector means, from their file."""
    file, name, _ = split(selector)
    source = source_of(file, tests)
    names = re.findall(r"^def test_(\w+)", source.read_text(), re.MULTILINE) if source else []
    return fnmatch.filter(names, name)


def cell(selectors: str | None, results: Sequence[Result], tests: Path = TESTS, cuda: bool = False) -> str:
    """What the results show of some tests; those that do not exist are named."""
    if selectors is None:
        return NOTHING
    chosen: dict[Result, None] = {}
    missing, waiting = [], False
    for selector in selectors.split():
        file, _, word = split(selector)
        names = names_in(selector, tests)
        ran = [r for r in results if r.file == file and r.name in names]
        meant = [r for r in ran if not word or word in r.id.split("-")]
        here = [r for r in meant if (r.launches is not None) == cuda]
        broken = [r for r in results if r.file == file and not r.name and r.outcome == "failed"]
        chosen |= dict.fromkeys(here + broken)
        gone = not names or bool(ran and not meant)
        missing += [selector] * gone
        waiting |= not gone and not here
    counts = Counter(NO_KERNEL if r.launches == 0 and r.outcome == "passed" else r.outcome for r in chosen)
    parts = [f"{counts[o]} {o}" for o in ("failed", "passed", "skipped") if counts[o]]
    parts += [f"{NO_KERNEL} in {counts[NO_KERNEL]}"] * bool(counts[NO_KERNEL])
    parts += [NOT_RUN] * waiting
    return ", ".join(parts + [f"{NO_TEST} {selector}" for selector in missing])


def table(results: Sequence[Result], rows: Sequence[Row] = ROWS, tests: Path = TESTS) -> str:
    """The table in Markdown."""
    heads = ("", "made by", "values", "backward", "compile", "CUDA kernels on the host", "tests")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [cell(s, results, tests) for s in (row.values, row.backward, row.compiled)]
        cells.append(cell(row.cuda, results, tests, cuda=True))
        selectors = " ".join(filter(None, (row.values, row.backward, row.compiled, row.cuda))).split()
        files = dict.fromkeys(f"test_{split(s)[0]}.py" for s in selectors if names_in(s, tests))
        lines.append("| " + " | ".join([row.name, row.made_by, *cells, ", ".join(files)]) + " |")
    return "\n".join(lines)


def run(columns: Sequence[str], path: Path, simt: str | None) -> Path:
    """Runs the tests of some columns, the CUDA kernels by that library."""
    selectors = " ".join(getattr(row, c) or "" for row in ROWS for c in columns).split()
    nodes = dict.fromkeys(f"{source_of(split(s)[0])}::test_{n}" for s in selectors for n in names_in(s))
    environment = {k: v for k, v in os.environ.items() if k != "FUSEDNORM_SIMT_LIBRARY"}
    environment |= {"FUSEDNORM_SIMT_LIBRARY": simt} if simt else {}
    options = [
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--continue-on-collection-errors",
        f"--junitxml={path}",
    ]
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    status = subprocess.run(command, cwd=TESTS.parent, env=environment, stdout=sys.stderr).returncode
    if status not in (0, 1):  # failures are in the file
        sys.exit(f"pytest ended with status {status}: no table")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("results", nargs="*", type=Path, help="junit files; none: run the tests")
    parser.add_argument("--simt", default=os.environ.get("FUSEDNORM_SIMT_LIBRARY"), metavar="LIBRARY")
    parser.add_argument("--folder", type=Path, default=TESTS.parent / "build/family", help="for the results")
    args = parser.parse_args(arguments)
    if not args.results:
        args.folder.mkdir(parents=True, exist_ok=True)
        folder = args.folder.resolve()
        args.results = [run(("values", "backward", "compiled"), folder / "cpu.xml", None)]
        if args.simt:
            args.results.append(run(("cuda",), folder / "simt.xml", str(Path(args.simt).resolve())))
    text = table(read(args.results))
    print(text)
    return int("failed" in text or NO_TEST in text)


if __name__ == "__main__":
    sys.exit(main())
