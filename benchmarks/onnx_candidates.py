"""ONNX Runtime's norms as candidates: a model of one operator each. Without the package there are none.

Inputs stay where torch has them and the output stays in the memory that the first call allocated: nothing is
copied in or out, and ONNX Runtime is spared the allocation that all others pay for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shapes import ADD_LAYER_NORM, Case

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
    ADD_LAYER_NORM: ("SkipLayerNormalization", "com.microsoft", ("x", "other", "weight", "bias")),
}
ELEMENT_TYPES = {"fp32": "FLOAT", "fp16": "FLOAT16"}


def version() -> str | None:
    """ONNX Runtime's version, or None where it is missing."""
    return None if MISSING else str(onnxruntime.__version__)


def _model(case: Case, eps: float) -> bytes:
    operator, domain, names = OPERATORS[case.norm]
    element = getattr(onnx.TensorProto, ELEMENT_TYPES[case.dtype])
    attributes: dict[str, Any] = {"epsilon": eps} | ({} if domain else {"axis": -1})
    node = onnx.helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    matrix, row = [case.rows, case.cols], [case.cols]
    if case.norm == ADD_LAYER_NORM:
        matrix = [1, *matrix]  # SkipLayerNormalization wants a batch
    inputs = [
        onnx.helper.make_tensor_value_info(n, element, matrix if n in ("x", "other") else row) for n in names
    ]
    output = onnx.helper.make_tensor_value_info("y", element, matrix)
    graph = onnx.helper.make_graph([node], operator, inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def forward(
    case: Case, x: Tensor, other: Tensor, parameters: tuple[Tensor, ...], eps: float
) -> Callable[[], Any] | None:
    """A call that computes the output and returns a getter of its array; None where there is no such."""
    if MISSING or case.dtype not in ELEMENT_TYPES or case.isa:
        return None  # ONNX Runtime picks its own instruction set
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 3
    # Its threads would otherwise spin on, on the cores that the next candidate is timed on.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(_model(case, eps), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    tensors = {"x": x, "other": other} | dict(zip(("weight", "bias"), parameters, strict=False))
    kept = []
    for name in OPERATORS[case.norm][2]:
        array = tensors[name].detach().numpy()
        if case.norm == ADD_LAYER_NORM and name in ("x", "other"):
            array = array[None]
        kept.append(array)
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    binding.bind_output("y", "cpu")

    def output() -> Any:
        return binding.get_outputs()[0].numpy().reshape(case.rows, case.cols)

    def run(kept: Any = kept) -> Any:  # keeps the arrays alive
        session.run_with_iobinding(binding)
        return output

    return run
