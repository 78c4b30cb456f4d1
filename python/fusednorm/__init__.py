"""Fused LayerNorm and RMSNorm for PyTorch, on the CPU and on CUDA.

``fusednorm.LayerNorm`` and ``fusednorm.RMSNorm`` stand in for ``torch.nn``'s; ``fusednorm.functional`` has
the functions; ``torch.ops.fusednorm`` the operators, which C++ programs reach too.
"""

from types import ModuleType

from fusednorm import _load as _load  # first: loads the library, or says why it cannot
from fusednorm import functional
from fusednorm._load import build_info, cmake_prefix_path, library_path
from fusednorm.decompositions import decompositions
from fusednorm.modules import LayerNorm, RMSNorm
from fusednorm.monitor import NormMonitor
from fusednorm.plans import explain

__version__: str = _load.VERSION

__all__ = [
    "LayerNorm",
    "NormMonitor",
    "RMSNorm",
    "build_info",
    "cmake_prefix_path",
    "decompositions",
    "explain",
    "functional",
    "library_path",
]


def __getattr__(name: str) -> ModuleType:
    if name == "distributed":  # on demand: importing DTensor takes a second
        import importlib

        return importlib.import_module("fusednorm.distributed")
    raise AttributeError(f"module 'fusednorm' has no attribute {name!r}")
