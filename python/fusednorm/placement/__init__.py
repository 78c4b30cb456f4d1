"""Where a norm stands around a sublayer and its residual: before, after, both, or after a scaled residual."""

from fusednorm.placement.constants import DeepNormConstants, deepnorm_constants
from fusednorm.placement.deepnorm import deepnorm_init
from fusednorm.placement.fusion import add_branch, add_norm, is_called_as
from fusednorm.placement.residual import Residual
from fusednorm.placement.stack import ResidualStack

__all__ = [
    "DeepNormConstants",
    "Residual",
    "ResidualStack",
    "add_branch",
    "add_norm",
    "deepnorm_constants",
    "deepnorm_init",
    "is_called_as",
]
