"""Bad input, by every route from Python: an error that names operator, argument, expected and given.

The C++ route is in cpp/test_ops.cpp. After each error the process works on.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
from conftest import NORMS, NormUnderTest

X = torch.arange(8.0).reshape(2, 4)
W = torch.ones(4)


def _routes(norm: NormUnderTest) -> dict[str, Callable[..., Any]]:
    """Each takes input, normalized_shape, weight, bias, eps and options."""

    def parameters(w: Any, b: Any) -> tuple[Any, ...]:
        return (w, b) if norm.has_bias else (w,)

    def backward(x: Tensor, shape: Any, w: Any = None, b: Any = None, eps: Any = 1e-5, **kw: Any) -> Any:
        statistics = [torch.zeros(x.shape[: x.dim() - len(shape)], device=x.device)] * (
            2 if norm.has_bias else 1
        )
        mask = [True] * 3
        g = torch.zeros(x.shape, device=x.device)
        return norm.op("_backward")(g, x, list(shape), *statistics, *parameters(w, b), eps, mask, **kw)

    return {
        "functional": lambda x, s, w=None, b=None, eps=1e-5, **k: norm.function(
            x, s, *parameters(w, b), eps, **k
        ),
        "op": lambda x, s, w=None, b=None, eps=1e-5, **k: norm.op()(x, s, *parameters(w, b), eps, **k),
        "op_forward": lambda x, s, w=None, b=None, eps=1e-5, **k: norm.op("_forward")(
            x, s, *parameters(w, b), eps, **k
        ),
        "op_backward": backward,
    }


def _cases(norm: NormUnderTest) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    """(name, arguments, options, what the message must hold)."""
    for shape in [(1,), (3,), (5,), (2, 4), (4, 1), (0,), ()]:
        yield f"weight {shape}", (X, [4], torch.ones(shape)), {}, r"weight: expected shape \[4\].*got \["
        if norm.has_bias:
            yield f"bias {shape}", (X, [4], W, torch.ones(shape)), {}, r"bias: expected shape \[4\].*got \["
    for dtype in (torch.int64, torch.complex64, torch.bool):
        yield f"input {dtype}", (X.to(dtype), [4]), {}, r"input: expected dtype float64, float32, .*got"
        yield f"weight {dtype}", (X, [4], W.to(dtype)), {}, r"weight: expected dtype float64, float32, .*got"
    yield "weight on meta", (X, [4], W.to("meta")), {}, r"weight: expected on the input's device .*got"
    yield "input on meta", (X.to("meta"), [4], W), {}, r"weight: expected on the input's device .*got"
    yield "no dimensions", (X, []), {}, r"normalized_shape: expected at least one dimension, got \[\]"
    yield "other shape", (X, [3]), {}, r"input: expected shape \[\*, 3\].*got \[2, 4\]"
    yield "more dimensions", (X, [1, 2, 4]), {}, r"input: expected shape \[\*, 1, 2, 4\].*got \[2, 4\]"
    yield "0-d", (torch.tensor(1.0), [1]), {}, r"input: expected shape \[\*, 1\].*got \[\]"
    for eps in (float("nan"), float("inf"), -float("inf")):
        yield f"eps {eps}", (X, [4], W, None, eps), {}, r"eps: expected a finite number, got"
    yield (
        "offset",
        (X, [4], W),
        {"weight_offset": float("nan")},
        r"weight_offset: expected a finite number, got nan",
    )
    if norm.has_bias:
        yield (
            "unbiased",
            (X[:, :1], [1]),
            {"unbiased": True},
            r"unbiased: expected rows of at least 2 elements",
        )
    else:
        message = r'casting_mode: expected "default" or "llama", got "gemma"'
        yield "casting", (X, [4], W), {"casting_mode": "gemma"}, message


ROUTES = ("functional", "op", "op_forward", "op_backward")
CASES = [
    pytest.param(norm, route, arguments, options, message, id=f"{norm.name}-{route}-{name}")
    for norm in NORMS
    for route in ROUTES
    for name, arguments, options, message in _cases(norm)
    # backward's mean and rstd have the leading dimensions' shape, which must exist
    if route != "op_backward" or arguments[0].dim() >= len(arguments[1])
]


@pytest.mark.parametrize(("norm", "route", "arguments", "options", "message"), CASES)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_bad_input(
    norm: NormUnderTest, route: str, arguments: tuple, options: dict, message: str, mode: str
) -> None:
    x = arguments[0]
    if mode == "grad" and x.is_floating_point():
        arguments = (x.detach().clone().requires_grad_(), *arguments[1:])
    context = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context(), pytest.raises(RuntimeError, match=rf"(?s)fusednorm::{norm.name}\w*: {message}"):
        _routes(norm)[route](*arguments, **options)
    assert norm(X, W, None).isfinite().all()


@pytest.mark.parametrize("inference", [False, True])
def test_layouts_without_a_kernel(norm: NormUnderTest, inference: bool) -> None:
    """Field report B38: sparse and nested tensors are refused by name."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
    with torch.inference_mode(inference):
        for x, what in [
            (X.to_sparse(), "Sparse"),
            (X.to_sparse_csr(), "SparseCsr"),
            (nested, "nested tensor"),
            (quantized, "quantized"),
        ]:
            for route in ("functional", "op", "op_forward"):
                with pytest.raises(
                    RuntimeError, match=rf"fusednorm::{norm.name}.*input: expected a dense.*{what}"
                ):
                    _routes(norm)[route](x, [4])
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(
        RuntimeError, match=rf"fusednorm::{norm.name}: input: expected a dense.*nested tensor"
    ):
        norm.function(jagged, [4])
    with pytest.raises(RuntimeError, match=r"weight: expected a dense \(strided\) tensor, got"):
        norm.function(X, [4], W.to_sparse())


def test_backward_operator_arguments(norm: NormUnderTest) -> None:
    count = 2 if norm.has_bias else 1  # of statistics, and of positional parameters
    statistics = [torch.zeros(2)] * count
    tail = [W, None][:count] + [1e-5, [True] * 3]

    def call(g: Tensor = X, statistics: list[Tensor] = statistics) -> Any:
        return norm.op("_backward")(g, X, [4], *statistics, *tail)

    call()
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape \[2, 4\].*got \[4, 2\]"):
        call(g=X.t())
    with pytest.raises(RuntimeError, match=r"grad_output: expected the input's dtype Float.*got Double"):
        call(g=X.double())
    with pytest.raises(
        RuntimeError, match=r"rstd: expected shape \[2\] \(the leading dimensions\), got \[3\]"
    ):
        call(statistics=[*statistics[:-1], torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"rstd: expected dtype Float, got BFloat16"):
        call(statistics=[*statistics[:-1], torch.zeros(2, dtype=torch.bfloat16)])
    with pytest.raises(RuntimeError, match=r"out_dtype: expected the input's dtype Float.*got BFloat16"):
        norm.op("_forward")(X, [4], out_dtype=torch.bfloat16)


def test_what_is_no_tensor(norm: NormUnderTest) -> None:
    for bad in (None, 3.0, [1.0, 2.0]):
        with pytest.raises((RuntimeError, TypeError), match=norm.name):
            norm.function(bad, [4])
    with pytest.raises((RuntimeError, TypeError), match=norm.name):
        norm.function(X, "four")
    with pytest.raises((RuntimeError, TypeError), match=norm.name):
        norm.function(X, [4], "weight")


def test_modules_refuse_at_construction() -> None:
    with pytest.raises(ValueError, match="casting_mode"):
        fusednorm.RMSNorm(4, casting_mode="gemma")
    for module in (fusednorm.LayerNorm, fusednorm.RMSNorm):
        for scale in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="input_scale: expected a positive number"):
                module(4, input_scale=scale)


def test_fast_entry_checks_its_argument_count() -> None:
    from fusednorm import _C

    with pytest.raises(TypeError, match="expected 5 to 8 positional arguments, got 1"):
        _C.layer_norm(X)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 2, 8)])
def test_zero_rows(norm: NormUnderTest, shape: tuple[int, ...]) -> None:
    """Field report B40: empty output, zero parameter gradients; not garbage, not None."""
    x = torch.empty(shape, requires_grad=True)
    w, b = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    y = norm(x, w, b)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape and w.grad.tolist() == [0.0] * 8
    assert not norm.has_bias or b.grad.tolist() == [0.0] * 8


def test_zero_columns(norm: NormUnderTest) -> None:
    x = torch.empty(3, 0, requires_grad=True)
    y = norm(x, torch.ones(0), None)
    y.sum().backward()
    assert y.shape == x.grad.shape == (3, 0)
    _, *statistics = norm.op("_forward")(x, [0])
    assert all(s.shape == (3,) and s.isnan().all() for s in statistics)


def test_every_operator_has_a_cuda_kernel(norm: NormUnderTest) -> None:
    """On a CPU build it is the one that says so (cpp/test_ops.cpp calls it)."""
    for suffix in ("", "_forward", "_backward"):
        name = f"fusednorm::{norm.name}{suffix}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
