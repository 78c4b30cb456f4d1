"""Fused LayerNorm and RMSNorm for PyTorch, on the CPU and on CUDA.

``fusednorm.LayerNorm`` and ``fusednorm.RMSNorm`` stand in for ``torch.nn``'s; ``fusednorm.functional`` has
the functions; ``torch.ops.fusednorm`` the operators, which C++ programs reach too.
"""

from typing import TYPE_CHECKING

from fusednorm import _paths, functional
from fusednorm.modules import (
    AddLayerNorm,
    AddRMSNorm,
    BatchNorm,
    GroupNorm,
    HeadNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    ScaleNorm,
)
from fusednorm.placement import Residual, ResidualStack, deepnorm_init
from fusednorm.plans import explain
from fusednorm.torch_support import loading
from fusednorm.torch_support.decompositions import decompositions
from fusednorm.torch_support.loading import build_info, cmake_prefix_path, library_path

if TYPE_CHECKING:
    from fusednorm.modules import AdaptiveNorm, PowerNorm
    from fusednorm.training import NormMonitor, NormWarmup

__version__: str = loading.VERSION

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

_ON_DEMAND = {  # torch._dynamo comes with the first three: it alone takes longer than all the rest
    "AdaptiveNorm": "modules",
    "NormMonitor": "training",
    "PowerNorm": "modules",
    "NormWarmup": "training",
    "training": "training",
}

_paths.keep_old_paths()
__getattr__ = _paths.on_demand(__name__, {**{old: old for old in _paths.MOVED}, **_ON_DEMAND})
