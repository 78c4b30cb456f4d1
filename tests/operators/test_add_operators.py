"""The fused residual operators as torch sees them: opcheck, derivatives, transforms, in place, errors."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import fusednorm
from conftest import NormUnderTest
from reference import DTYPES, residual_sum
from test_add_norm import BF16, FP32, add_norm, problem, same
from test_operators import norm_options
from torch_checks import backends, opcheck, traces

PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16)]
pairs = pytest.mark.parametrize(("dtype", "residual_dtype"), PAIRS)


def op_of(norm: NormUnderTest, suffix: str = "") -> Any:
    return getattr(torch.ops.fusednorm, f"add_{norm.name}{suffix}").default


def _inputs(norm: NormUnderTest, shape: tuple[int, ...] = (3, 2, 5), dims: int = 1) -> list[Tensor]:
    """input, residual, weight (and bias), in fp64."""
    row = shape[len(shape) - dims :]
    shapes = [shape, shape, row, row][: 4 if norm.has_bias else 3]
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def _function(norm: NormUnderTest, dims: int = 1, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda x, r, w, b=None: add_norm(norm, x, r, w, b, dims, eps=0.1, alpha=0.7, **options)


def _reference(norm: NormUnderTest, dims: int = 1, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(x: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s = x + 0.7 * r
        return norm.reference(s, w, b, dims=dims, eps=0.1, **options), s

    return function


# ---- opcheck -------------------------------------------------------------------------------------------


@norm_options
@pytest.mark.parametrize("requires_grad", [False, True])
@pairs
@traces
def test_opcheck(
    trace_all: bool,
    norm: NormUnderTest,
    options: dict[str, Any],
    requires_grad: bool,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> None:
    x, r, w, b, g, h = (t.requires_grad_(requires_grad) for t in problem((3, 2, 5), dtype, residual_dtype))
    parameters = (w, b) if norm.has_bias else (w,)
    kw = {"alpha": 0.7, **options}
    traced = trace_all or dtype == residual_dtype == FP32
    opcheck(op_of(norm), (x, r, [5], *parameters, 0.1), kw, traced=traced)
    opcheck(op_of(norm, "_forward"), (x, r, [5], *parameters, 0.1), kw, traced=traced)
    with torch.no_grad():
        _, s, *statistics = op_of(norm, "_forward")(x, r, [5], *parameters, 0.1, **kw)
    s.requires_grad_(requires_grad)
    if requires_grad and BF16 in (dtype, residual_dtype):
        return  # double backward repeats roundings in another order: opcheck compares too closely
    outputs = 4
    masks = list(itertools.product([False, True], repeat=outputs))[1:]
    some = [((True,) * outputs, True), ((False, True) + (False,) * (outputs - 2), False)]
    if requires_grad:
        masks = [mask for mask, _ in some]
    for mask in masks:
        for of_sum in (h, None):
            arguments = (g, of_sum, s, [5], *statistics, *parameters, 0.1, x.dtype, list(mask))
            chosen = trace_all or (traced and (mask, of_sum is not None) in some)
            opcheck(op_of(norm, "_backward"), arguments, kw, traced=chosen)


@pairs
def test_opcheck_in_place(norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """Field report B33: the schema says what is written, and no output is an alias."""
    x, r, *parameters = problem((3, 2, 5), dtype, residual_dtype)[: 4 if norm.has_bias else 3]
    opcheck(op_of(norm, "_"), (x, r, [5], *parameters, 0.1), {"alpha": 0.7})
    residual = op_of(norm, "_")._schema.arguments[1]
    assert residual.name == "residual" and residual.alias_info.is_write
    assert sum(a.alias_info is not None for a in op_of(norm, "_")._schema.arguments) == 1


def test_output_mask(norm: NormUnderTest) -> None:
    for (dtype, residual_dtype), alpha in itertools.product(PAIRS, (1.0, 0.7)):
        x, r, w, b, g, h = problem((7, 40), dtype, residual_dtype)
        parameters = (w, b) if norm.has_bias else (w,)
        _, s, *statistics = op_of(norm, "_forward")(x, r, [40], *parameters, norm.eps, alpha=alpha)
        outputs = 4

        def call(mask: tuple[bool, ...], of_sum: Tensor | None) -> tuple[Tensor | None, ...]:
            tail = (*parameters, norm.eps, dtype, list(mask))  # noqa: B023
            return op_of(norm, "_backward")(g, of_sum, s, [40], *statistics, *tail, alpha=alpha)  # noqa: B023

        for of_sum in (h, None):
            whole = call((True,) * outputs, of_sum)
            assert whole[0].data_ptr() != whole[1].data_ptr()  # two outputs of an operator
            for mask in itertools.product([False, True], repeat=outputs):
                for wanted, got, expected in zip(mask, call(mask, of_sum), whole, strict=True):
                    assert (got is not None) == wanted
                    assert got is None or (torch.equal(got, expected) and got.dtype == expected.dtype)


@pytest.mark.parametrize("residual_dtype", [BF16, FP32])
def test_out_dtype(norm: NormUnderTest, residual_dtype: torch.dtype) -> None:
    """A 16-bit input with an fp32 output, as CUDA's autocast asks for: the bits of a widened input."""
    x, r, w, b, _, h = problem((9, 70), BF16, residual_dtype)
    g = torch.randn(9, 70)
    parameters = (w, b) if norm.has_bias else (w,)
    leaves = x.clone().requires_grad_(), r.clone().requires_grad_()
    y, s, *_ = op_of(norm, "_forward")(*leaves, [70], *parameters, norm.eps, out_dtype=FP32)
    wide = x.float().requires_grad_(), r.clone().requires_grad_()
    expected = add_norm(norm, *wide, w, b)
    assert y.dtype == FP32 and same((y, s), expected)
    dx, dr = torch.autograd.grad((y, s), leaves, (g, h))
    want_x, want_r = torch.autograd.grad(expected, wide, (g, h))
    assert dx.dtype == BF16 and torch.equal(dx, want_x.to(BF16)) and torch.equal(dr, want_r)


# ---- Derivatives ---------------------------------------------------------------------------------------


@norm_options
@pytest.mark.parametrize(("shape", "dims"), [((3, 2, 5), 1), ((2, 3, 4), 2), ((6,), 1)])
def test_gradcheck(norm: NormUnderTest, options: dict, shape: tuple[int, ...], dims: int) -> None:
    """Both outputs, and either alone; reverse, forward, and both batched."""
    inputs = [t.requires_grad_() for t in _inputs(norm, shape, dims)]
    f, parameters = _function(norm, dims, **options), [t.detach() for t in inputs[2:]]
    kinds = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    for function, leaves in (
        (f, inputs),
        (lambda *a: f(*a)[0], inputs),
        (lambda x, r: f(x, r, *parameters)[1], inputs[:2]),  # the parameters are not in it
    ):
        assert gradcheck(function, leaves, **kinds)
    for function, leaves in ((f, inputs), (lambda *a: f(*a)[0], inputs)):
        assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


@norm_options
def test_torch_func(norm: NormUnderTest, options: dict) -> None:
    """jvp, jacobians both ways, hessian, vmap and vmap of grad; opcheck does not catch a wrong hessian."""
    inputs = tuple(_inputs(norm, (2, 4)))
    f, r = _function(norm, **options), _reference(norm, **options)
    argnums = tuple(range(len(inputs)))
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def loss(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        def of(*arguments: Tensor) -> Tensor:
            y, s = function(*arguments)
            return y.sin().sum() + (y * s).sum()

        return of

    close = torch.testing.assert_close
    close(torch.func.jvp(f, inputs, tangents), torch.func.jvp(r, inputs, tangents))
    close(torch.func.jacrev(f, argnums)(*inputs), torch.func.jacrev(r, argnums)(*inputs))
    close(torch.func.jacfwd(f, argnums)(*inputs), torch.func.jacfwd(r, argnums)(*inputs))
    close(torch.func.hessian(loss(f), argnums)(*inputs), torch.func.hessian(loss(r), argnums)(*inputs))
    batched = tuple(torch.randn(3, *t.shape, dtype=t.dtype) for t in inputs)
    for dims in (
        (0,) * len(inputs),
        (0,) + (None,) * (len(inputs) - 1),
        (None, 0) + (None,) * (len(inputs) - 2),
    ):
        given = tuple(b if d == 0 else t for b, t, d in zip(batched, inputs, dims, strict=True))
        close(torch.vmap(f, dims)(*given), torch.vmap(r, dims)(*given))
        grads = torch.vmap(torch.func.grad(loss(f), argnums), dims)(*given)
        close(grads, torch.vmap(torch.func.grad(loss(r), argnums), dims)(*given))


def test_dual_numbers_through_backward(norm: NormUnderTest) -> None:
    x, r, w, *_ = _inputs(norm)
    tangent = torch.randn_like(x)

    def grad_of(function: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(r.clone().requires_grad_(), tangent)
            y, s = function(x, dual, w)
            (g,) = torch.autograd.grad((y.sin() * s).sum(), dual, create_graph=True)
            return forward_ad.unpack_dual(g).tangent

    torch.testing.assert_close(grad_of(_function(norm)), grad_of(_reference(norm)))


# ---- Transforms ----------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A pre-norm block: the sum of one add is the stream of the next."""

    def __init__(self, norm: NormUnderTest, **kw: Any) -> None:
        super().__init__()
        add = fusednorm.AddLayerNorm if norm.has_bias else fusednorm.AddRMSNorm
        self.linear = nn.Linear(16, 16)
        self.first, self.second = add(16, alpha=0.9, **kw), add(16, **kw)

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        y, stream = self.first(x, stream)
        y, stream = self.second(self.linear(y), stream)
        return y.relu() + stream


def _loss_and_grads(
    model: Callable[..., Tensor], parameters: list[Tensor], x: Tensor, stream: Tensor
) -> tuple[Tensor, ...]:
    loss = model(x, stream).square().sum()
    return (loss, *torch.autograd.grad(loss, [*parameters, x, stream]))


@backends
def test_compile_without_breaks(norm: NormUnderTest, backend: str) -> None:
    torch.compiler.reset()
    model, x = _Block(norm), torch.randn(4, 16, requires_grad=True)
    stream, parameters = torch.randn(4, 16, requires_grad=True), list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = _loss_and_grads(model, parameters, x, stream)
    torch.testing.assert_close(_loss_and_grads(compiled, parameters, x, stream), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, stream), model(x, stream))


@pairs
def test_compiled_calls_have_the_same_bits(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    torch.compiler.reset()
    x, r, w, b, g, h = problem((32, 64), dtype, residual_dtype)

    def grads(x: Tensor, r: Tensor, w: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        y, s = add_norm(norm, x, r, w, b, alpha=0.7)
        return (y, s, *torch.autograd.grad((y, s), (x, r, w), (g, h)))

    leaves = [t.requires_grad_() for t in (x, r, w)]
    compiled = torch.compile(lambda *a: add_norm(norm, *a, b, alpha=0.7), fullgraph=True, backend="aot_eager")
    y, s = compiled(*leaves)
    assert same((y, s, *torch.autograd.grad((y, s), leaves, (g, h))), grads(*leaves, g, h))


def test_compiled_autograd(norm: NormUnderTest) -> None:
    """With both outputs used, and either alone."""
    torch.compiler.reset()
    x, r, w, b, g, h = problem((4, 16), BF16, FP32)
    leaves = [t.requires_grad_() for t in ((x, r, w, b) if norm.has_bias else (x, r, w))]
    for use in ((g, h), (g, None), (None, h)):
        outputs = add_norm(norm, *leaves, alpha=0.7)
        used_outputs, used_grads = zip(
            *[(o, t) for o, t in zip(outputs, use, strict=True) if t is not None], strict=True
        )
        torch.autograd.backward(used_outputs, used_grads, retain_graph=True)
        expected = [t.grad for t in leaves]
        compiler = torch.compile(fullgraph=True, backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(compiler):
            for _ in range(2):
                for t in leaves:
                    t.grad = None
                torch.autograd.backward(used_outputs, used_grads, retain_graph=True)
                assert same([t.grad for t in leaves], expected)
        for t in leaves:
            t.grad = None


@pytest.mark.parametrize("strict", [False, True])
def test_export(norm: NormUnderTest, strict: bool, tmp_path) -> None:
    kw = {"eps": 1e-12} if norm.has_bias else {"eps": None, "casting_mode": "llama"}
    model, x, r = _Block(norm, weight_offset=0.5, **kw), torch.randn(4, 16), torch.randn(4, 16)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "stream": {0: batch}}
    program = torch.export.export(model, (x, r), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count(f"fusednorm.add_{norm.name}.default") == 2
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    wide = torch.randn(9, 16)
    assert torch.equal(loaded(wide, wide + 1), model(wide, wide + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_decompositions(norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """Other exporters get torch's operators; dtypes as ours."""
    add = fusednorm.AddLayerNorm if norm.has_bias else fusednorm.AddRMSNorm
    x, r, *_ = problem((3, 8), dtype, residual_dtype)
    for kw in ({}, {"eps_outside": True, "unbiased": True} if norm.has_bias else {"casting_mode": "llama"}):
        model = add(8, alpha=0.7, weight_offset=0.5, eps=1e-3, **kw)
        program = torch.export.export(model, (x, r)).run_decompositions(fusednorm.decompositions())
        assert "fusednorm" not in str(program.graph)
        (y, s), (want_y, want_s) = program.module()(x, r), model(x, r)
        assert (y.dtype, s.dtype) == (dtype, residual_dtype)
        # Ours adds once in the accumulation type; torch's add does not promise a fused one.
        wide = {"atol": 1e-2, "rtol": 1.6e-2} if BF16 in (dtype, residual_dtype) else {}
        if residual_dtype == FP32 and dtype == torch.float64:  # an fp64 output of rows that are fp32
            wide = {"atol": 1e-5, "rtol": 1.3e-6}  # assert_close's own for fp32
        torch.testing.assert_close((y, s), (want_y, want_s), **wide)


def test_fake_and_meta_tensors(norm: NormUnderTest) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(3, 4, 8, dtype=BF16).transpose(0, 1)
        y, s = add_norm(norm, x, torch.randn(4, 3, 8))
        z = op_of(norm, "_")(x, torch.randn(4, 3, 8), [8])
    for t, dtype in ((y, BF16), (s, FP32), (z, BF16)):
        assert (t.shape, t.dtype, t.is_contiguous(), t.device.type) == ((4, 3, 8), dtype, True, "cpu")
    x = torch.empty(3, 8, device="meta")
    for t in (*add_norm(norm, x, x.double()), op_of(norm, "_")(x, x.clone(), [8])):
        assert t.is_meta and t.shape == (3, 8)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(norm: NormUnderTest, use_reentrant: bool) -> None:
    """Field report B56: recomputed gradients have the same bits."""
    from torch.utils.checkpoint import checkpoint

    model = _Block(norm)
    x, stream = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    _, *expected = _loss_and_grads(model, list(model.parameters()), x, stream)
    checkpoint(model, x, stream, use_reentrant=use_reentrant).square().sum().backward()
    assert same([t.grad for t in (*model.parameters(), x, stream)], expected)


def test_tensor_subclasses_and_modes(norm: NormUnderTest) -> None:
    """The fast entry steps aside: a subclass stays one, a mode sees the call."""

    class Sub(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    for given in ((x.as_subclass(Sub), x), (x, x.as_subclass(Sub))):
        assert [type(t) for t in add_norm(norm, *given)] == [Sub, Sub]
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        add_norm(norm, x, x)
    assert any(f"fusednorm.add_{norm.name}" in name for name in seen)
    with torch.autograd.graph.save_on_cpu():
        y, _ = add_norm(norm, x.requires_grad_(), x)
    y.sum().backward()
    assert x.grad is not None


# ---- In place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_in_place(norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """The bits of the out-of-place operator; the residual may lie anywhere, and only its elements change."""
    x, r, w, b, *_ = problem((2, 3, 4, 33), dtype, residual_dtype)
    parameters = (w, b) if norm.has_bias else (w,)
    y, s = op_of(norm)(x, r, [33], *parameters, alpha=0.7)
    whole = torch.full((4, 3, 2, 80), 7.0, dtype=residual_dtype)
    places = [torch.empty_like(r), whole[..., 5:38].transpose(0, 2), whole[..., 5:71:2].transpose(0, 2)]
    places.append(torch.empty(33, 4, 3, 2, dtype=residual_dtype).permute(3, 2, 1, 0))
    for place in places:
        place.copy_(r)
        outside = whole.clone()
        given = [t.clone() for t in (x, *parameters)]
        result = op_of(norm, "_")(x, place, [33], *parameters, alpha=0.7)
        assert torch.equal(result, y) and torch.equal(place, s) and result.is_contiguous()
        assert same((x, *parameters), given)
        if place.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            others = torch.ones_like(whole, dtype=torch.bool)
            others.as_strided(place.shape, place.stride(), place.storage_offset()).fill_(False)
            assert torch.equal(whole[others], outside[others])


def test_in_place_without_grad_only(norm: NormUnderTest) -> None:
    """Refused under autograd, whatever asks for a gradient; under no_grad and in inference mode it runs."""
    tensors = problem((3, 8), FP32)[: 4 if norm.has_bias else 3]
    names = ("input", "residual", "weight", "bias")
    for place, name in enumerate(names[: len(tensors)]):
        given = [t.clone().requires_grad_(i == place) for i, t in enumerate(tensors)]
        message = rf"fusednorm::add_{norm.name}_: {name}: expected no gradient .* use add_{norm.name}, or"
        with pytest.raises(RuntimeError, match=message):
            op_of(norm, "_")(*given[:2], [8], *given[2:])
        assert same(given, tensors)  # nothing was written
        expected = op_of(norm)(*tensors[:2], [8], *tensors[2:])
        for context in (torch.no_grad, torch.inference_mode):
            residual = given[1].detach().clone()
            with context():
                y = op_of(norm, "_")(given[0], residual, [8], *given[2:])
            assert same((y, residual), expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], tensors[0])
        with pytest.raises(RuntimeError, match="input: expected no gradient .* with a tangent"):
            op_of(norm, "_")(dual, tensors[1].clone(), [8])


def test_in_place_changes_the_version(norm: NormUnderTest) -> None:
    """What autograd has kept of the residual is known to have changed."""
    for context in (torch.no_grad, torch.inference_mode):
        leaf = torch.randn(3, 8, requires_grad=True)
        stream = leaf * 1
        z = stream.square()
        before = stream._version
        with context():
            op_of(norm, "_")(torch.randn(3, 8), stream.detach(), [8])
        assert stream._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    with torch.inference_mode():
        op_of(norm, "_")(torch.randn(3, 8), torch.randn(3, 8), [8])


def test_in_place_memory(norm: NormUnderTest) -> None:
    """Expanded and overlapping residuals are refused, and what lies in the residual's memory."""
    x, memory = torch.randn(4, 6), torch.randn(60)
    for residual in (
        torch.randn(1, 6).expand(4, 6),
        torch.randn(4, 1).expand(4, 6),
        memory.as_strided((4, 6), (5, 1)),
    ):
        before = residual.clone()
        message = rf"fusednorm::add_{norm.name}_: residual: expected memory of its own .* got shape \[4, 6\]"
        with pytest.raises(RuntimeError, match=message):
            op_of(norm, "_")(x, residual, [6])
        with pytest.raises(RuntimeError, match=message):
            op_of(norm, "_")(
                x.to("meta"), torch.empty_strided(residual.shape, residual.stride(), device="meta"), [6]
            )
        assert torch.equal(residual, before)
    residual, wide = memory[:24].view(4, 6), torch.randn(6, 16)
    sparse = wide[1:5, :6]
    for name, *arguments in (
        ("input", memory[3:27].view(4, 6), residual, [6]),
        ("weight", x, residual, [6], residual[1]),
        ("input", wide[2:6, :6], sparse, [6]),  # strided rows of which three are shared
        ("input", wide[1:5, 5:11], sparse, [6]),  # one column
        ("weight", x, sparse, [6], wide[4, :6]),
        ("weight", x, sparse, [6], wide.view(-1)[16 * 2 - 5 :][:6]),  # its last element
    ):
        before = arguments[1].clone()
        with pytest.raises(RuntimeError, match=f"{name}: expected memory apart from residual"):
            op_of(norm, "_")(*arguments)
        assert torch.equal(arguments[1], before)
    for beside in (wide[1:5, 6:12], wide[1:5, 10:16], wide.view(6, 2, 8)[1:5, 1, :6]):
        expected = op_of(norm)(beside.clone(), sparse.clone(), [6])
        y = op_of(norm, "_")(beside, sparse, [6])
        assert same((y, sparse), expected)
    q, k = torch.randn(2, 3, 2, 4, 6).unbind(2)  # of a packed projection
    expected = op_of(norm)(q.transpose(1, 2), k.transpose(1, 2).clone(), [6])
    y = op_of(norm, "_")(q.transpose(1, 2), k.transpose(1, 2), [6])
    assert same((y, k.transpose(1, 2)), expected)
    expected = op_of(norm)(sparse, sparse.clone(), [6])
    assert same((op_of(norm, "_")(sparse, sparse, [6]), sparse), expected)
    expected = op_of(norm)(residual, residual, [6])
    y = op_of(norm, "_")(residual, residual, [6])  # the input may be the residual itself
    assert same((y, residual), expected)
    empty = torch.empty(0, 6)
    assert op_of(norm, "_")(empty, empty.clone(), [6]).shape == (0, 6)


@backends
def test_in_place_compiles(norm: NormUnderTest, backend: str) -> None:
    """Functionalized: the caller's stream is updated as in eager, several times in one graph."""
    torch.compiler.reset()
    w = torch.randn(8)

    def steps(x: Tensor, stream: Tensor) -> Tensor:
        y = op_of(norm, "_")(x, stream, [8], w)
        y = op_of(norm, "_")(y.tanh(), stream, [8], w, alpha=0.5)
        return y + stream

    compiled = torch.compile(steps, fullgraph=True, backend=backend)
    for rows in (4, 5):
        x, stream = torch.randn(rows, 8), torch.randn(rows, 8)
        other = stream.clone()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, stream), steps(x, other))
        torch.testing.assert_close(stream, other)


def test_in_place_under_vmap(norm: NormUnderTest) -> None:
    x, r = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    y, s = add_norm(norm, x, r, eps=1e-5 if norm.has_bias else 1e-6)
    result = torch.vmap(lambda a, b: op_of(norm, "_")(a, b, [8], eps=norm.eps))(x, r)
    torch.testing.assert_close((result, r), (y, s))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda a: op_of(norm, "_")(a, r[0], [8]))(x)


# ---- Errors --------------------------------------------------------------------------------------------

X = torch.arange(8.0).reshape(2, 4)
W = torch.ones(4)


def _cases() -> dict[str, tuple[tuple[Any, ...], dict[str, Any], str]]:
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {}
    for shape in [(1, 4), (4,), (2, 3), (3, 4), (2, 4, 1), (2, 1)]:  # field report B17: no broadcast
        message = r"residual: expected shape \[2, 4\] \(the input's shape\), got \["
        cases[f"residual {shape}"] = ((X, torch.ones(shape), [4]), {}, message)
    cases["residual on meta"] = ((X, X.to("meta"), [4]), {}, "residual: expected on the input's device")
    cases["input on meta"] = ((X.to("meta"), X, [4]), {}, "residual: expected on the input's device")
    cases["integer residual"] = ((X, X.long(), [4]), {}, "residual: expected dtype float64, .*, got Long")
    cases["integer input"] = ((X.long(), X, [4]), {}, "input: expected dtype float64, .*, got Long")
    cases["sparse residual"] = ((X, X.to_sparse(), [4]), {}, r"residual: expected a dense \(strided\) tensor")
    cases["normalized_shape"] = ((X, X, [3]), {}, r"input: expected shape \[\*, 3\]")
    cases["weight"] = ((X, X, [4], torch.ones(3)), {}, r"weight: expected shape \[4\]")
    for alpha in (float("nan"), float("inf"), -float("inf")):
        cases[f"alpha {alpha}"] = ((X, X, [4]), {"alpha": alpha}, "alpha: expected a finite number, got")
    cases["eps"] = ((X, X, [4]), {"eps": float("nan")}, "eps: expected a finite number, got nan")
    return cases


# Inside vmap there are neither sparse tensors nor shapes that differ in a dimension to batch over.
BAD_INPUT = [
    pytest.param(case, mode, id=f"{case}-{mode}")
    for case, mode in itertools.product(_cases(), ("grad", "no_grad", "inference", "vmap"))
    if mode != "vmap" or not ("sparse" in case or "meta" in case or "residual (" in case)
]


@pytest.mark.parametrize(("case", "mode"), BAD_INPUT)
def test_bad_input(norm: NormUnderTest, case: str, mode: str) -> None:
    arguments, options, message = _cases()[case]
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, nullcontext)
    function = getattr(fusednorm.functional, f"add_{norm.name}")
    routes = {"": function, "op": op_of(norm), "_forward": op_of(norm, "_forward"), "_": op_of(norm, "_")}
    for name, route in routes.items():
        given = list(arguments)
        if mode == "grad" and name != "_" and given[0].is_floating_point():
            given[0] = given[0].clone().requires_grad_()

        def call(x: Tensor, residual: Tensor) -> Any:
            return route(x, residual, *given[2:], **options)  # noqa: B023

        with context(), pytest.raises(RuntimeError, match=rf"(?s)fusednorm::add_{norm.name}\w*: {message}"):
            if mode == "vmap":
                torch.vmap(call)(given[0].expand(3, 2, 4), given[1].expand(3, 2, 4).clone())
            else:
                call(*given[:2])
    assert all(t.isfinite().all() for t in add_norm(norm, X, X))


def test_backward_operator_arguments(norm: NormUnderTest) -> None:
    count = 4 if norm.has_bias else 3
    tail = [W, None][: count - 2] + [1e-5]

    def call(
        g: Tensor = X, h: Tensor | None = X, s: Tensor = X, dtype: torch.dtype = FP32, alpha: float = 1.0
    ) -> Any:
        statistics = [torch.zeros(2)] * (count - 2)
        return op_of(norm, "_backward")(g, h, s, [4], *statistics, *tail, dtype, [True] * 4, alpha=alpha)

    call()
    for bad, message in [
        ({"g": X.t()}, r"grad_output: expected shape \[2, 4\] \(the shape of residual_out\), got \[4, 2\]"),
        ({"g": X.double()}, r"grad_output: expected the input's dtype Float.*got Double"),
        ({"h": X.t()}, r"grad_residual_out: expected shape \[2, 4\].*got \[4, 2\]"),
        ({"h": X.double()}, r"grad_residual_out: expected the dtype of residual_out Float, got Double"),
        ({"s": X[:1]}, r"grad_output: expected shape \[1, 4\]"),
        ({"dtype": torch.int64}, r"input_dtype: expected float64, .*, got Long"),
        ({"alpha": float("nan")}, "alpha: expected a finite number, got nan"),
    ]:
        with pytest.raises(RuntimeError, match=rf"fusednorm::add_{norm.name}_backward: {message}"):
            call(**bad)


def test_what_is_no_tensor(norm: NormUnderTest) -> None:
    function = getattr(fusednorm.functional, f"add_{norm.name}")
    for bad in (None, 3.0, [1.0, 2.0]):
        for arguments in ((bad, X), (X, bad)):
            with pytest.raises((RuntimeError, TypeError), match=norm.name):
                function(*arguments, [4])


def test_every_operator_has_a_cuda_kernel(norm: NormUnderTest) -> None:
    for suffix in ("", "_", "_forward", "_backward"):
        name = f"fusednorm::add_{norm.name}{suffix}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def test_sums_of_the_composites(norm: NormUnderTest) -> None:
    """Inside transforms the sum is computed in fp64: within a rounding of the kernels'."""
    for dtype, residual_dtype in PAIRS:
        x, r, *_ = problem((4, 64), dtype, residual_dtype)
        y, s = torch.vmap(lambda a, b: add_norm(norm, a, b, alpha=0.7))(x, r)
        torch.testing.assert_close(s, residual_sum(x, r, 0.7))
        torch.testing.assert_close(y, add_norm(norm, x, r, alpha=0.7)[0])
