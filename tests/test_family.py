"""The table of the family: what it counts, and that it hides neither failures nor tests that are gone."""

import subprocess
import sys
from pathlib import Path

import torch

import family
from conftest import SIMT_LIBRARY, NormUnderTest
from family_rows import ROWS, Row

SOURCE = """
def test_values(): ...
def test_gradients(): ...
def test_compiles(): ...
    def test_of_a_class(): ...
"""
LAUNCHED = '<properties><property name="launches" value="{}"/></properties>'


def _entry(name: str, content: str = "") -> str:
    return f'<testcase classname="tests.test_one" name="test_{name}">{content}</testcase>'


def _junit(path: Path, *entries: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(entries)}</testsuite></testsuites>")
    return path


def _tests(folder: Path) -> Path:
    for name in ("one", "two", "four", "five"):
        (folder / f"test_{name}.py").write_text(SOURCE)
    return folder


def test_cells(tmp_path: Path) -> None:
    tests = _tests(tmp_path)
    results = family.read([
        _junit(
            tmp_path / "cpu.xml",
            _entry("values[layer_norm-2]"),
            _entry("values[layer_norm-3]"),
            _entry("values[rms_norm-3]", "<skipped/>"),
            _entry("gradients", "<failure>no</failure>"),
            _entry("compiles"),
            _entry("compiles", "<error>in teardown</error>"),
            _entry("values[1-2]").replace("one", "four"),
            _entry("values[2-1]").replace("one", "four"),
            '<testcase classname="" name="tests.test_two"><error>in collection</error></testcase>',
        )
    ])  # fmt: skip

    def cell(selectors: str | None) -> str:
        return family.cell(selectors, results, tests)

    assert cell("one::values") == "2 passed, 1 skipped"
    assert cell("one::values[layer_norm]") == "2 passed"
    assert cell("one::values[rms_norm]") == "1 skipped"
    assert cell("one::values[layer_norm] one::v*") == "2 passed, 1 skipped"  # nothing counts twice
    assert cell("four::values") == "2 passed"  # and nothing is one for having the same words
    assert cell("two::*") == "1 failed, not run"  # its import failed
    assert cell("one::values one::gradients") == "1 failed, 2 passed, 1 skipped"
    assert cell("one::compiles") == "1 failed"
    assert cell("five::values") == "not run"
    assert cell("one::values five::values") == "2 passed, 1 skipped, not run"
    assert cell(None) == "—"
    # Tests that are not there: no file, no function, no such parameter.
    for gone in ("three::values", "one::value", "one::of_a_class", "one::values[layer]"):
        assert cell(gone) == f"no test {gone}"
        assert cell(f"one::values[layer_norm] {gone}") == f"2 passed, no test {gone}"


def test_cuda_needs_a_launch(tmp_path: Path) -> None:
    tests = _tests(tmp_path)
    cpu = _junit(tmp_path / "cpu.xml", _entry("values[a]"), _entry("gradients"))
    simt = _junit(
        tmp_path / "simt.xml",
        _entry("values[a]", LAUNCHED.format(3)),
        _entry("values[b]", LAUNCHED.format(0)),
        _entry("compiles", LAUNCHED.format(0) + "<failure/>"),
    )
    results = family.read([cpu, simt])

    def cells(selectors: str) -> tuple[str, str]:
        return family.cell(selectors, results, tests), family.cell(selectors, results, tests, cuda=True)

    assert cells("one::values") == ("1 passed", "1 passed, no kernel ran in 1")
    assert cells("one::values[b]") == ("not run", "no kernel ran in 1")
    assert cells("one::gradients") == ("1 passed", "not run")
    assert cells("one::values[a] one::gradients") == ("2 passed", "1 passed, not run")
    assert cells("one::compiles") == ("not run", "1 failed")


def test_a_later_run_counts(tmp_path: Path) -> None:
    tests = _tests(tmp_path)
    first = _junit(tmp_path / "1.xml", _entry("values", "<failure/>"), _entry("gradients"))
    second = _junit(tmp_path / "2.xml", _entry("values"))
    for paths, expected in (([first, second], "2 passed"), ([second, first], "1 failed, 1 passed")):
        assert family.cell("one::*", family.read(paths), tests).startswith(expected)


def test_table_and_status(tmp_path: Path) -> None:
    tests = _tests(tmp_path)
    results = family.read([_junit(tmp_path / "cpu.xml", _entry("values"), _entry("gradients", "<failure/>"))])
    row = Row("A norm", "code", "one::values", "one::gradients", None, "two::values")
    *_, line = family.table(results, [row], tests).splitlines()
    assert line == "| A norm | code | 1 passed | 1 failed | — | not run | test_one.py, test_two.py |"
    whole = family.table([])
    assert all(f"| {row.name} |" in whole for row in ROWS) and "passed" not in whole
    failed = _junit(
        tmp_path / "failed.xml",
        '<testcase classname="tests.test_values" name="test_wide_rows[layer_norm-1]"><failure/></testcase>',
    )
    ran = subprocess.run([sys.executable, family.__file__, failed], capture_output=True, text=True)
    assert ran.returncode == 1 and "| LayerNorm | LayerNorm, layer_norm | 1 failed" in ran.stdout, ran.stderr


def test_a_run_of_pytest_is_read(tmp_path: Path) -> None:
    """As pytest writes it, ids and all: here this file's own test below."""
    path = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={path}"]
    command.append(f"{__file__}::test_launches_are_recorded")
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    results = family.read([path])
    assert {(r.file, r.name, r.outcome) for r in results} == {("family", "launches_are_recorded", "passed")}
    assert sorted(r.id for r in results) == ["layer_norm", "rms_norm"]
    assert all(r.launches == (1 if SIMT_LIBRARY else None) for r in results)


def test_launches_are_recorded(norm: NormUnderTest) -> None:
    assert norm(torch.ones(2, 8), None, None).shape == (2, 8)
