"""Fused LayerNorm and RMSNorm for PyTorch, on the CPU and on CUDA.

``fusednorm.LayerNorm`` and ``fusednorm.RMSNorm`` stand in for ``torch.nn``'s; ``fusednorm.functional`` has
the functions; ``torch.ops.fusednorm`` the operators, which C++ programs reach too.
"""

from types import ModuleType

from fusednorm import _load as _load  # first: loads the library, or says why it cannot
from fusednorm import functional
from fusednorm._load import build_info, cmake_prefix_path, library_path
from fusednorm.adaptive_norm import AdaptiveNorm
from fusednorm.add_modules import AddLayerNorm, AddRMSNorm
from fusednorm.column_norms import BatchNorm
from fusednorm.decompositions import decompositions
from fusednorm.deepnorm import deepnorm_init
from fusednorm.group_modules import GroupNorm, InstanceNorm
from fusednorm.head_norm import HeadNorm
from fusednorm.modules import LayerNorm, RMSNorm
from fusednorm.monitor import NormMonitor
from fusednorm.placement import Residual
from fusednorm.plans import explain
from fusednorm.power_norm import PowerNorm
from fusednorm.scale_norm import ScaleNorm
from fusednorm.stack import ResidualStack
from fusednorm.warmup import NormWarmup

__version__: str = _load.VERSION

__all__ = [
    "AdaptiveNorm",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm",
    "GroupNorm",
    "HeadNorm",
    "InstanceNorm",
    "LayerNorm",
    "NormMonitor",
    "NormWarmup",
    "PowerNorm",
    "RMSNorm",
    "Residual",
    "ResidualStack",
    "ScaleNorm",
    "build_info",
    "cmake_prefix_path",
    "decompositions",
    "deepnorm_init",
    "explain",
    "functional",
    "library_path",
]


def __getattr__(name: str) -> ModuleType:
    if name == "distributed":  # on demand: importing DTensor takes a second
        import importlib

        return importlib.import_module("fusednorm.distributed")
    raise AttributeError(f"module 'fusednorm' has no attribute {name!r}")
