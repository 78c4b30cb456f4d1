"""From the source tree to an archive, a wheel and an installation, and what goes wrong with those.

Builds once from the archive, in a path with a space (about a minute on two cores).
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import fusednorm

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
FORWARD = "import torch, fusednorm; print(fusednorm.LayerNorm(4)(torch.arange(4.0)).sum().item())"


def _run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FUSEDNORM_BUILD_DIR")}
    return subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True)


def _tracked() -> set[str]:
    listing = _run(["git", "ls-files", "--", "csrc", "python", "tests", "benchmarks"], ROOT).stdout
    return {name for name in listing.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the tree so that nothing is left beside the sources."""
    folder = tmp_path_factory.mktemp("source tree")
    copy = folder / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build*", "dist", "__pycache__")
    )
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    made = _run([sys.executable, "-c", code], copy)
    assert made.returncode == 0, made.stderr
    return folder / made.stdout.split()[-1]


# The wheel is a build of its own: every CPU kernel is compiled again, minutes on two cores.
needs_a_build = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """Without CUDA, as on a machine that has no nvcc: its kernels are compiled by the build itself."""
    command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(archive.parent), str(archive)]
    made = _run(command, archive.parent, FUSEDNORM_CUDA="0")
    assert made.returncode == 0, made.stderr[-3000:]
    return next(archive.parent.glob("*.whl"))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    target = tmp_path / "site"
    made = _run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], tmp_path)
    assert made.returncode == 0, made.stderr
    return target


def _import(installed: Path, cwd: Path, code: str = FORWARD) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-c", code], cwd, PYTHONPATH=str(installed))


def test_archive_holds_every_source(archive: Path) -> None:
    """Field report B80."""
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    missing = (_tracked() | {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE"}) - names
    assert len(_tracked()) > 20 and not missing


@needs_a_build
def test_wheel_content_and_tag(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.split("-")[2:4] == [python, python] and "linux" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        "fusednorm/__init__.py",
        "fusednorm/py.typed",
        "fusednorm/_built.py",
        "fusednorm/lib/libfusednorm.so",
        "fusednorm/include/fusednorm/fusednorm.h",
        "fusednorm/share/cmake/fusednorm/fusednorm-config.cmake",
    }
    assert expected <= names
    assert any(name.startswith("fusednorm/_C.") and name.endswith(".so") for name in names)


@needs_a_build
def test_installed_package_works_anywhere(installed: Path, tmp_path: Path) -> None:
    ran = _import(installed, tmp_path)
    assert ran.returncode == 0 and abs(float(ran.stdout)) < 1e-6, ran.stderr
    ran = _import(
        installed, tmp_path, "import fusednorm; print(fusednorm.build_info()['torch'])"
    )  # torch second
    assert torch.__version__.startswith(ran.stdout.strip()), ran.stderr


@needs_a_build
def test_cpu_build_says_so_to_a_cuda_tensor(installed: Path, tmp_path: Path) -> None:
    """Field report B74. The CUDA key's kernel is called by key: there need be no GPU."""
    code = (
        "import torch, fusednorm; assert fusednorm.build_info()['cuda'] is None\n"
        "keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
        "torch.ops.fusednorm.rms_norm.default.redispatch(keys, torch.ones(2, 4), [4])"
    )
    ran = _import(installed, tmp_path, code)
    assert "fusednorm::rms_norm: fusednorm was built without CUDA" in ran.stderr


@needs_a_build
def test_import_errors_say_what_to_do(installed: Path, tmp_path: Path) -> None:
    """Field report B67: the library absent, corrupt, for another torch; never a silent fallback."""
    library, built = installed / "fusednorm/lib/libfusednorm.so", installed / "fusednorm/_built.py"
    stamp = built.read_text()

    built.write_text(stamp.replace(torch.__version__.split("+")[0], "2.3.1"))
    error = _import(installed, tmp_path).stderr
    assert f"built for torch 2.3.1, but this is torch {torch.__version__}" in error and "rebuild" in error

    built.write_text(stamp)
    content = library.read_bytes()
    for damaged in (b"", b"no library", content[:1000], content[: len(content) // 2]):
        library.write_bytes(damaged)
        error = _import(installed, tmp_path).stderr
        assert "ImportError: fusednorm: cannot load" in error and "is damaged" in error and "rebuild" in error

    library.unlink()
    error = _import(installed, tmp_path).stderr
    assert "ImportError: fusednorm: cannot load" in error and "libfusednorm.so" in error

    built.unlink()
    error = _import(installed, tmp_path).stderr
    assert "holds no built library" in error and "make" in error


def test_configuring_without_torch_says_so(tmp_path: Path) -> None:
    """What a build under pip's isolation meets."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "b"), f"-DPython_EXECUTABLE={bare}/bin/python"]
    ran = _run(command, tmp_path)
    assert ran.returncode != 0 and "has no torch" in ran.stderr and "--no-build-isolation" in ran.stderr


def test_configuring_without_nvcc_says_cpu_build(tmp_path: Path) -> None:
    """Field report B74."""
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "b"), f"-DPython_EXECUTABLE={sys.executable}"]
    ran = _run([*command, "-DFUSEDNORM_BUILD_TESTS=OFF", "-DCMAKE_CUDA_COMPILER=NOTFOUND"], tmp_path)
    assert ran.returncode == 0 and "fusednorm: CPU build without CUDA" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "80-real;90-real;100-real;120"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0 9.0+PTX"}, "80-real;90"),
        ({"TORCH_CUDA_ARCH_LIST": "9.0", "FUSEDNORM_CUDA_ARCHS": "100-real;120"}, "100-real;120"),
    ],
)
def test_architectures_are_as_asked(tmp_path: Path, environment: dict[str, str], expected: str) -> None:
    """Field report B74: TORCH_CUDA_ARCH_LIST set or empty, no GPU."""
    if fusednorm.build_info()["cuda"] is None:
        pytest.skip("no nvcc")
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "b"), f"-DPython_EXECUTABLE={sys.executable}"]
    ran = _run([*command, "-DFUSEDNORM_BUILD_TESTS=OFF"], tmp_path, **environment)
    assert ran.returncode == 0, ran.stderr
    assert f" for {expected}\n" in ran.stdout
