"""The norms as modules: ``torch.nn``'s classes with another ``forward`` where torch has them.

An existing module becomes one of ours by its class alone, and keeps parameters, hooks, flags and sharing::

    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = fusednorm.LayerNorm

They are subclasses, so what looks for ``nn.LayerNorm`` or ``nn.RMSNorm`` (optimizer groups, quantizers,
``isinstance``) finds them, and a strict ``load_state_dict`` passes both ways.
"""

from typing import TYPE_CHECKING

from fusednorm._paths import on_demand
from fusednorm.modules.add import AddLayerNorm, AddRMSNorm
from fusednorm.modules.batch_norm import BatchNorm
from fusednorm.modules.groups import GroupNorm, InstanceNorm
from fusednorm.modules.head_norm import HeadNorm
from fusednorm.modules.rows import LayerNorm, RMSNorm
from fusednorm.modules.scale_norm import ScaleNorm

if TYPE_CHECKING:
    from fusednorm.modules.adaptive_norm import AdaptiveNorm
    from fusednorm.modules.power_norm import PowerNorm

__all__ = [
    "AdaptiveNorm",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm",
    "GroupNorm",
    "HeadNorm",
    "InstanceNorm",
    "LayerNorm",
    "PowerNorm",
    "RMSNorm",
    "ScaleNorm",
]

__getattr__ = on_demand(__name__, {"AdaptiveNorm": "adaptive_norm", "PowerNorm": "power_norm"})
