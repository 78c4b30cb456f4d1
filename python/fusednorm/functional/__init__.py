"""The norms as functions, in the argument order of ``torch.nn.functional``; our options are keyword-only.

All of them take fp64, fp32, bf16 and fp16 on any strides, with weight, bias and residual of any of the four
dtypes; keep statistics and sums in fp32 (fp64 for fp64); and return a contiguous tensor of the input's shape
and dtype (``group_norm`` and ``instance_norm``: of its memory format). A wrong shape, dtype, device or layout
raises a ``RuntimeError`` that names the operator, the argument, what was expected and what was given.
"""

from fusednorm.functional.add import add_layer_norm, add_rms_norm
from fusednorm.functional.groups import group_norm, instance_norm
from fusednorm.functional.rows import layer_norm, rms_norm, scale_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
    "scale_norm",
]

for _name in __all__:  # what a pickled function is found by
    globals()[_name].__module__ = __name__
