"""ONNX Runtime's norms as candidates: a model of one operator each. Without the package there are none.

Inputs stay where torch has them and the outputs stay in the memory that the first call allocated: nothing is
copied in or out, and ONNX Runtime is spared the allocation that all others pay for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shapes import ADD_TITLES, Case

try:
    import onnx
    import onnxruntime
except ImportError:
    onnx = onnxruntime = None  # type: ignore[assignment]

MISSING = onnx is None
# name, domain, inputs. There is no bf16, and no model is worth its building in fp64.
OPERATORS = {
    "layer_norm": ("LayerNormalization", "", ("x", "weight", "bias")),
    "rms_norm": ("SimplifiedLayerNormalization", "", ("x", "weight")),
    "add_layer_norm": ("SkipLayerNormalization", "com.microsoft", ("x", "residual", "weight", "bias")),
    "add_rms_norm": ("SkipSimplifiedLayerNormalization", "com.microsoft", ("x", "residual", "weight")),
}
MATRICES = ("x", "residual")  # all other inputs are rows
ELEMENT_TYPES = {"fp32": "FLOAT", "fp16": "FLOAT16"}


def version() -> str | None:
    """ONNX Runtime's version, or None where it is missing."""
    return None if MISSING else str(onnxruntime.__version__)


def _model(case: Case, eps: float) -> bytes:
    operator, domain, names = OPERATORS[case.norm]
    element = getattr(onnx.TensorProto, ELEMENT_TYPES[case.dtype])
    attributes: dict[str, Any] = {"epsilon": eps} | ({} if domain else {"axis": -1})
    matrix, row, made = [case.rows, case.cols], [case.cols], ["y"]
    if case.norm in ADD_TITLES:
        matrix = [1, *matrix]  # the operators with a skip want a batch
        made = ["y", "", "", "sum"]  # no statistics
    node = onnx.helper.make_node(operator, names, made, domain=domain, **attributes)
    value = onnx.helper.make_tensor_value_info
    inputs = [value(n, element, matrix if n in MATRICES else row) for n in names]
    outputs = [value(n, element, matrix) for n in made if n]
    graph = onnx.helper.make_graph([node], operator, inputs, outputs)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def forward(
    case: Case, x: Tensor, residual: tuple[Tensor, ...], parameters: tuple[Tensor, ...], eps: float
) -> Callable[[], Any] | None:
    """A call that computes the outputs and returns a getter of them; None where there is no such."""
    if MISSING or case.dtype not in ELEMENT_TYPES or case.isa:
        return None  # ONNX Runtime picks its own instruction set
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 3
    # Its threads would otherwise spin on, on the cores that the next candidate is timed on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(_model(case, eps), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    tensors = dict(zip(OPERATORS[case.norm][2], (x, *residual, *parameters), strict=True))
    kept = []
    for name, tensor in tensors.items():
        array = tensor.detach().numpy()
        if residual and name in MATRICES:
            array = array[None]
        kept.append(array)
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name in ("y", "sum") if residual else ("y",):
        binding.bind_output(name, "cpu")

    def outputs() -> tuple[Tensor, ...]:
        arrays = (value.numpy() for value in binding.get_outputs())
        return tuple(torch.from_numpy(array.reshape(case.rows, case.cols)) for array in arrays)

    def run(kept: Any = kept) -> Any:  # keeps the arrays alive
        session.run_with_iobinding(binding)
        return outputs

    return run
