"""Drives CMake and tags the wheel; CMakeLists.txt is the only build.

``FUSEDNORM_BUILD_DIR`` names a CMake build tree to use again.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project into the wheel."""

    def run(self) -> None:
        build = Path(os.environ.get("FUSEDNORM_BUILD_DIR", Path(self.build_temp) / "cmake")).resolve()
        prefix = ROOT / "python" if self.inplace else Path(self.build_lib)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
        if not (build / "CMakeCache.txt").exists():
            configure += ["-DFUSEDNORM_BUILD_TESTS=OFF"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", jobs], check=True)
        subprocess.run(["cmake", "--install", str(build), "--prefix", str(prefix.resolve())], check=True)

    def get_outputs(self) -> list[str]:
        return []


class SourceArchive(sdist):
    """An archive of every source: what builds, what tests, what measures."""

    def make_distribution(self) -> None:
        self.filelist.extend(["CMakeLists.txt", "Makefile", ".clang-format", "python/README.md"])
        for folder in ("csrc", "python/fusednorm", "tests", "benchmarks"):
            for path in (ROOT / folder).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    self.filelist.append(str(path.relative_to(ROOT)))
        super().make_distribution()


setup(
    packages=find_packages("python"),
    package_dir={"": "python"},
    package_data={"fusednorm": ["py.typed"]},
    # Names the module for the wheel's tag (CPython version and platform); CMake builds it.
    ext_modules=[Extension("fusednorm._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "sdist": SourceArchive},
    zip_safe=False,
)
