"""The pages that people read: short enough, every link and test they name there, their examples run.

And what csrc/README.md says of its rooms: a room includes only rooms below it.
"""

import re
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(p for d in ROOT.iterdir() if d.is_dir() for p in d.glob("*.md"))]
    if subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode
)
# Kept as the run of 2026-11-30 drew it: the next `make gallery` draws four of one message each.
WIDE = {"gallery.png": 1710}
# From the caller down; kernels include maths alone.
ROOMS = ("python", "keys", "cpu", "cuda", "device", "operators", "cpu/kernels", "cuda/kernels", "maths")
LEVELS = dict(zip(ROOMS, (0, 1, 2, 2, 3, 4, 5, 5, 6), strict=True))


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """To files, and to headings of the page that is linked."""
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in t]
    for target in targets:
        name, _, heading = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, target


def test_the_tests_of_the_guarantees_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"\[Tests?\]\((\S+)\):((?: `test_\w+…?`,?)+)", text)
    assert len(lines) >= 6
    for file, names in lines:
        source = (ROOT / file).read_text()
        for name in re.findall(r"test_\w+", names):
            assert f"def {name}" in source, name


@pytest.mark.parametrize("page", ["README.md", "python/norms.md"])
def test_examples_run(page: str) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))
    assert code
    exec(compile(code, page, "exec"), {})


def test_pictures_are_narrow() -> None:
    for picture in (ROOT / "benchmarks/pictures").glob("*.png"):
        (width,) = struct.unpack(">I", picture.read_bytes()[16:20])
        assert width <= WIDE.get(picture.name, 1200), picture.name


def _room(path: str) -> str:
    first, *rest = path.split("/")
    return f"{first}/kernels" if rest and rest[0] == "kernels" else first


def test_rooms_include_what_is_below_them() -> None:
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    found = 0
    for source in sources:
        room = _room(source.relative_to(ROOT / "csrc").as_posix())
        if room not in LEVELS:  # fusednorm.h
            continue
        for name in re.findall(r'^#include "([^"]+/[^"]+)"', source.read_text(), re.M):
            other = _room(name)
            if other in LEVELS and other != room:
                found += 1
                assert LEVELS[other] > LEVELS[room], f"{source.relative_to(ROOT)} includes {name}"
    assert found > 30
