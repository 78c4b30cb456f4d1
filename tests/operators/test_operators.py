"""The operators as torch sees them: opcheck, OpInfo, derivatives of every order, every transform."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db

from conftest import NORMS, NormUnderTest
from reference import DTYPES, ulps
from torch_checks import backends, opcheck, traces

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "layer_norm": [{}, {"weight_offset": 1.0}, {"eps_outside": True, "unbiased": True}],
    "rms_norm": [{}, {"weight_offset": 1.0}],
}
NORM_OPTIONS = [(norm, options) for norm in NORMS for options in OPTIONS[norm.name]]
norm_options = pytest.mark.parametrize(
    ("norm", "options"), NORM_OPTIONS, ids=[f"{n.name}-{'-'.join(o) or 'plain'}" for n, o in NORM_OPTIONS]
)


def _inputs(
    norm: NormUnderTest, shape: tuple[int, ...] = (3, 2, 5), dims: int = 1, **kw: Any
) -> list[Tensor]:
    kw = {"dtype": torch.float64, **kw}
    tensors = [torch.randn(shape, **kw), torch.randn(shape[-dims:], **kw), torch.randn(shape[-dims:], **kw)]
    return tensors[: 3 if norm.has_bias else 2]


def _function(norm: NormUnderTest, dims: int = 1, **options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b=None: norm(x, w, b, dims=dims, eps=0.1, **options)


def _reference(norm: NormUnderTest, dims: int = 1, **options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b=None: norm.reference(x, w, b, dims=dims, eps=0.1, **options)


# ---- opcheck and OpInfo ------------------------------------------------------------------------------


@norm_options
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@traces
def test_opcheck(
    trace_all: bool, norm: NormUnderTest, options: dict, requires_grad: bool, dtype: torch.dtype
) -> None:
    inputs = _inputs(norm, dtype=dtype, requires_grad=requires_grad)
    traced = trace_all or dtype == torch.float32
    opcheck(norm.op(), (inputs[0], [5], *inputs[1:]), {"eps": 0.1, **options}, traced=traced)
    opcheck(norm.op("_forward"), (inputs[0], [5], *inputs[1:]), {"eps": 0.1, **options}, traced=traced)
    statistics = norm.op("_forward")(
        inputs[0].detach(), [5], *[t.detach() for t in inputs[1:]], 0.1, **options
    )[1:]
    grad_output = torch.randn(3, 2, 5, dtype=dtype, requires_grad=requires_grad)
    for mask in itertools.product([False, True], repeat=3):
        arguments = (grad_output, inputs[0], [5], *statistics, *inputs[1:], 0.1, list(mask))
        # Double backward in bf16 repeats roundings in another order: opcheck compares too closely there.
        if any(mask) and not (requires_grad and dtype == torch.bfloat16):
            chosen = trace_all or (traced and (all(mask) or mask == (False, True, False)[: len(mask)]))
            opcheck(norm.op("_backward"), arguments, options, traced=chosen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opinfo_samples(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """torch's own samples; a negative eps among them follows the formula."""
    info = next(op for op in op_db if op.name == f"nn.functional.{norm.name}")
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 6
    for sample in samples:
        y = norm.function(sample.input, *sample.args, **sample.kwargs)
        shape, *parameters = sample.args
        dims, eps = len(shape), sample.kwargs.get("eps", 1e-5 if norm.has_bias else None)
        weight, bias = (*parameters, None, None)[:2]
        expected = norm.reference(sample.input, weight, bias, dims=dims, eps=eps)
        # A negative eps brings variance + eps near 0, where the error of the variance is magnified.
        limit = 64.0 if eps is not None and eps < 0 else 8.0
        assert ulps(y, expected, dims) <= limit
        inputs = [t for t in (sample.input, *parameters) if isinstance(t, Tensor)]
        for grad, t in zip(torch.autograd.grad(y.sum(), inputs), inputs, strict=True):
            assert grad.shape == t.shape and grad.dtype == t.dtype


def test_opinfo_errors(norm: NormUnderTest) -> None:
    info = next(op for op in op_db if op.name == f"nn.functional.{norm.name}")
    errors = list(info.error_inputs("cpu")) if info.error_inputs_func else []
    assert errors or norm.has_bias  # torch has them for rms_norm only
    rms_errors = errors or list(
        next(o for o in op_db if o.name == "nn.functional.rms_norm").error_inputs("cpu")
    )
    for error in rms_errors:
        sample = error.sample_input
        arguments = sample.args if errors else (sample.args[0], sample.args[1], None, sample.args[2])
        with pytest.raises(error.error_type, match=f"fusednorm::{norm.name}"):
            norm.function(sample.input, *arguments)


# ---- Derivatives ---------------------------------------------------------------------------------------


@norm_options
@pytest.mark.parametrize(("shape", "dims"), [((3, 2, 5), 1), ((2, 3, 4), 2), ((6,), 1), ((4, 2), 1)])
def test_gradcheck(norm: NormUnderTest, options: dict, shape: tuple[int, ...], dims: int) -> None:
    """Field report B23; reverse, forward, and both batched."""
    inputs = _inputs(norm, shape, dims, requires_grad=True)
    f = _function(norm, dims, **options)
    assert gradcheck(
        f, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("norm", NORMS, ids=[n.name for n in NORMS])
def test_backward_operator_differentiates_by_grad_output(norm: NormUnderTest) -> None:
    inputs = _inputs(norm, requires_grad=True)
    grad_output = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        statistics = norm.op("_forward")(inputs[0], [5], *inputs[1:], 0.1)[1:]
    mask = [True] * 3

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return norm.op("_backward")(g, x, [5], *statistics, w, *inputs[2:], 0.1, mask)[:2]

    # The statistics belong to x: where it moves, the derivative is through the recomputed ones, which
    # finite differences of the kernel do not see. So x and w are fixed, and g is checked.
    assert gradcheck(lambda g: backward(g, inputs[0].detach(), inputs[1].detach()), grad_output)


def test_third_derivatives() -> None:
    """Field report B34 (torch's third derivative of layer_norm is silently wrong)."""
    w = torch.tensor([1.0, 3.0], dtype=torch.float64)
    for norm, second, expected in [
        (NORMS[0], 0.0, (None, -1.526581, 3.522880, -6.503779)),
        (NORMS[1], 1.0, (4.110542, -0.242988, -2.178510, 5.096674)),
    ]:
        t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        value = norm(torch.stack([t, torch.tensor(second, dtype=torch.float64)]), w, None, eps=0.1).sum()
        for want in expected:
            assert want is None or value.item() == pytest.approx(want, abs=2e-6)
            (value,) = torch.autograd.grad(value, t, create_graph=True)


@norm_options
def test_torch_func(norm: NormUnderTest, options: dict) -> None:
    """jvp, jacobians both ways, hessian, vmap of grad; opcheck does not catch a wrong hessian."""
    inputs = tuple(_inputs(norm, (2, 4)))
    f, r = _function(norm, **options), _reference(norm, **options)
    argnums = tuple(range(len(inputs)))
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *a: function(*a).sin().sum()

    close = torch.testing.assert_close
    close(torch.func.jvp(f, inputs, tangents), torch.func.jvp(r, inputs, tangents))
    close(torch.func.jacrev(f, argnums)(*inputs), torch.func.jacrev(r, argnums)(*inputs))
    close(torch.func.jacfwd(f, argnums)(*inputs), torch.func.jacfwd(r, argnums)(*inputs))
    close(torch.func.hessian(loss(f), argnums)(*inputs), torch.func.hessian(loss(r), argnums)(*inputs))
    nested = torch.func.jacfwd(torch.func.jacfwd(loss(f)))(*inputs)
    close(nested, torch.func.jacfwd(torch.func.jacfwd(loss(r)))(*inputs))
    batched = tuple(torch.randn(3, *t.shape, dtype=t.dtype) for t in inputs)
    for dims in ((0,) * len(inputs), (0,) + (None,) * (len(inputs) - 1)):
        given = tuple(b if d == 0 else t for b, t, d in zip(batched, inputs, dims, strict=True))
        close(torch.vmap(f, dims)(*given), torch.vmap(r, dims)(*given))
        grads = torch.vmap(torch.func.grad(loss(f), argnums), dims)(*given)
        close(grads, torch.vmap(torch.func.grad(loss(r), argnums), dims)(*given))


def test_per_sample_gradients() -> None:
    """Field report B69."""
    x, w = torch.tensor([[1.0, 2, 4], [3, 0, 1]]), torch.tensor([1.0, 2, 3])
    dw = torch.vmap(torch.func.grad(lambda w, x: NORMS[1](x, w, None, eps=0.0).sum()), (None, 0))(w, x)
    expected = torch.tensor([[0.377964, 0.755929, 1.511858], [1.643167, 0, 0.547722]])
    torch.testing.assert_close(dw, expected, atol=2e-6, rtol=0)
    dx = torch.vmap(torch.func.grad(lambda x: NORMS[0](x, None, None)[0]))(x)
    expected = torch.tensor([[0.229082, -0.343620, 0.114538], [0.057273, 0.114538, -0.171811]])
    torch.testing.assert_close(dx, expected, atol=2e-6, rtol=0)


def test_dual_numbers_through_backward(norm: NormUnderTest) -> None:
    """Field report B71: forward over reverse, by dual numbers."""
    x, w, *_ = _inputs(norm)
    tangent = torch.randn_like(x)

    def grad_of(function: Callable[..., Tensor]) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), tangent)
            (g,) = torch.autograd.grad(function(dual, w).sin().sum(), dual, create_graph=True)
            return forward_ad.unpack_dual(g).tangent

    torch.testing.assert_close(grad_of(_function(norm)), grad_of(_reference(norm)))


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1e20, 1e-30])
def test_decomposed_routes_are_as_right_as_the_kernels(
    norm: NormUnderTest, offset: float, scale: float
) -> None:
    """vmap, jvp and create_graph compute in ATen arithmetic; a large mean or extreme rows cost no digits."""
    x = (torch.randn(4, 64) + offset) * scale
    g = torch.randn(4, 64)
    kw = {"eps": 1e-5 if scale == 1.0 else 0.0}
    expected = norm.reference(x, None, None, **kw)
    f = lambda t: norm(t, None, None, **kw)  # noqa: E731
    assert ulps(torch.vmap(f)(x), expected) <= 1
    assert ulps(torch.func.jvp(f, (x,), (torch.zeros_like(x),))[0], expected) <= 1
    if scale != 1e-30:  # its gradients exceed fp32's range
        xr, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        (dx,) = torch.autograd.grad(f(xr), xr, g, create_graph=True)
        (want,) = torch.autograd.grad(norm.reference(wide, None, None, **kw), wide, g.double())
        assert ulps(dx, want) <= 1


def test_gradients_of_a_single_row_are_no_alias() -> None:
    x, b = torch.randn(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    g = torch.ones(8)
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(NORMS[0](x, None, b), b, g, create_graph=create_graph)
        assert grad.data_ptr() != g.data_ptr()


# ---- Transforms ----------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self, norm: NormUnderTest, **kw: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)
        self.norm = norm.module(16, **kw)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


def _loss_and_grads(
    model: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor
) -> tuple[Tensor, ...]:
    loss = model(x).square().sum()
    return (loss, *torch.autograd.grad(loss, parameters))


@backends
def test_compile_without_breaks(norm: NormUnderTest, backend: str) -> None:
    """Field report B53."""
    torch.compiler.reset()
    model, x = _Model(norm), torch.randn(4, 8)
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = _loss_and_grads(model, parameters, x)
    torch.testing.assert_close(_loss_and_grads(compiled, parameters, x), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_compiled_calls_have_the_same_bits(norm: NormUnderTest) -> None:
    """Guarantee 2 holds for compiled calls: the operator is not decomposed."""
    torch.compiler.reset()
    module, x = norm.module(64), torch.randn(32, 64)
    compiled = torch.compile(module, fullgraph=True)
    assert torch.equal(compiled(x), module(x))


def test_dynamic_batch_compiles_once(norm: NormUnderTest) -> None:
    """What the first batch compiled serves the others (with dynamic=True torch restarts once for floats)."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm.module(8), backend=counter, fullgraph=True, dynamic=True)
    compiled(torch.randn(3, 8))
    frames = counter.frame_count
    for batch in (5, 9, 17):
        assert compiled(torch.randn(batch, 8)).shape == (batch, 8)
    assert counter.frame_count == frames


def test_compiled_autograd(norm: NormUnderTest) -> None:
    model, x = _Model(norm), torch.randn(4, 8)
    expected = _loss_and_grads(model, list(model.parameters()), x)[1:]
    torch.compiler.reset()
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            for p, want in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, want)


@pytest.mark.parametrize("strict", [False, True])
def test_export(norm: NormUnderTest, strict: bool, tmp_path) -> None:
    """Field report B76: options and absent arguments survive saving and loading."""
    kw = {"eps": 1e-12} if norm.has_bias else {"eps": None, "casting_mode": "llama"}
    model, x = _Model(norm, weight_offset=0.5, **kw), torch.randn(4, 8)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}}, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert f"fusednorm.{norm.name}.default" in names
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    wide = torch.randn(9, 8)
    assert torch.equal(loaded(wide), model(wide))


@pytest.mark.slow(reason="compiles a C++ program for each norm: half a minute on an idle core")
def test_aot_inductor(norm: NormUnderTest, tmp_path) -> None:
    model, x = _Model(norm), torch.randn(4, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


def test_fake_and_meta_tensors(norm: NormUnderTest) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.randn(3, 4, 8, dtype=torch.bfloat16).transpose(0, 1), torch.randn(8)
        y = norm(x, w, None)
    assert (y.shape, y.dtype, y.is_contiguous(), y.device.type) == ((4, 3, 8), torch.bfloat16, True, "cpu")
    meta = norm(torch.empty(3, 8, device="meta"), None, None)
    assert meta.is_meta and meta.shape == (3, 8)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoint(norm: NormUnderTest, use_reentrant: bool, autocast: bool) -> None:
    """Field report B56: recomputed gradients have the same bits."""
    from torch.utils.checkpoint import checkpoint

    model, x = _Model(norm), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.float().square().sum().backward()
    for p, want in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad, want)


def test_saved_tensor_hooks_and_version_counters(norm: NormUnderTest) -> None:
    """save_on_cpu works; a saved input that was changed is an error, never a wrong gradient (B33)."""
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = norm(x, torch.ones(8), None)
    y.sum().backward()
    assert x.grad is not None
    h = x * 1
    y = norm(h, None, None)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice(norm: NormUnderTest) -> None:
    """Field report B04: the incoming gradient is untouched; a freed graph says so."""
    x = torch.tensor([1.0, 2, 4], requires_grad=True)
    y, g = norm(x, None, None), torch.tensor([1.0, 2, 3])
    y.backward(g, retain_graph=True)
    once = x.grad.clone()
    y.backward(g)
    assert torch.equal(x.grad, 2 * once) and g.tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(g)


def test_tensor_subclasses_and_modes(norm: NormUnderTest) -> None:
    """The fast entry steps aside: a subclass stays one, a mode sees the call."""

    class Sub(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    assert type(norm(x.as_subclass(Sub), None, None)) is Sub

    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        norm(x, None, None)
    assert any(f"fusednorm.{norm.name}" in name for name in seen)


def test_jit_trace_runs_the_operator(norm: NormUnderTest) -> None:
    """Field report B90: tracing works; scripting a module is not supported by torch any longer."""
    import warnings

    module, x = norm.module(8), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, x)
    assert torch.equal(traced(2 * x), module(2 * x))
