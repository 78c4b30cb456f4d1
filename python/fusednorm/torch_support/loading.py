"""Loads the compiled library, or says in one message why it cannot and what to do."""

import importlib
import types
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parent.parent

library_path: str = str(_ROOT / "lib" / "libfusednorm.so")
"""The operators' shared library: what a C++ program links or loads."""

cmake_prefix_path: str = str(_ROOT / "share" / "cmake")
"""What to put in CMAKE_PREFIX_PATH for ``find_package(fusednorm)``."""

_REBUILD = "rebuild it beside this torch: pip install --no-build-isolation --force-reinstall --no-deps ."


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _built() -> types.ModuleType:
    try:
        return importlib.import_module("fusednorm._built")
    except ImportError as error:
        raise ImportError(
            f"fusednorm: {_ROOT} holds no built library (a source tree, not an installation?). "
            "Run 'make' in the source tree, or pip install --no-build-isolation ."
        ) from error


def _check_whole(path: str) -> None:
    """Raises OSError for a truncated library: the loader would end the process with SIGBUS."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
    number = [int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62))]
    end_of_section_table = number[0] + number[1] * number[2]  # it stands last in the file
    if header[:4] != b"\x7fELF" or size < end_of_section_table:
        raise OSError(f"the file is damaged ({size} bytes)")


def _load() -> types.ModuleType:
    built_for = _built().TORCH_VERSION
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"fusednorm was built for torch {built_for}, but this is torch {torch.__version__}: a "
            f"library with torch's C++ interface fits one minor version only; {_REBUILD}"
        )
    try:
        _check_whole(library_path)
        loader: Any = torch.ops
        loader.load_library(library_path)
        return importlib.import_module("fusednorm._C")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"fusednorm: cannot load {library_path} (built for torch {built_for}, this is torch "
            f"{torch.__version__}): {error}; {_REBUILD}"
        ) from error


_C = _load()
VERSION: str = _built().VERSION


def build_info() -> dict[str, Any]:
    """What this build is, and what it runs on.

    Returns:
        ``version``; ``torch``, ``compiler``, ``cuda`` (versions it was built with; None without CUDA);
        ``cuda_architectures``; ``torch_cpu_capability`` (what torch dispatches to, which the environment
        variable ``ATEN_CPU_CAPABILITY`` can lower); ``cpu_kernels`` (ours: ``avx512bf16``, ``avx512``,
        ``avx2`` or ``portable``); ``caches`` (bytes of the CPU's caches as its kernels take them, and where
        the sizes are from; ``FUSEDNORM_L1_BYTES``, ``FUSEDNORM_L2_BYTES`` and
        ``FUSEDNORM_LAST_LEVEL_BYTES`` set others).
    """
    info: dict[str, Any] = _C.build_info()
    return info
