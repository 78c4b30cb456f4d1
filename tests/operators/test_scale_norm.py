"""ScaleNorm: values and gradients against float64, extreme rows, derivatives, transforms, errors."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fusednorm
import reference
from fusednorm.functional import scale_norm
from reference import DTYPES, HALVES, ulps
from test_guarantees import _strided_views
from test_values import COLS, FORWARD_ULPS
from torch_checks import opcheck, traces

ops = torch.ops.fusednorm
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def _rows(rows: int, cols: int, dtype: torch.dtype, *lengths: float) -> Tensor:
    """Random rows of these lengths, in turn (none given: as they come)."""
    x = torch.randn(rows, cols, dtype=torch.float64)
    if lengths:
        length = torch.tensor(lengths, dtype=torch.float64).repeat(rows)[:rows]
        x = x / x.norm(dim=-1, keepdim=True) * length.unsqueeze(-1)
    return x.to(dtype)


def _grads(x: Tensor, g: Tensor, grad: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in (x, g)]
    return torch.autograd.grad(scale_norm(*inputs, eps), inputs, grad)


def _check(x: Tensor, g: Tensor, eps: float = 1e-5, least: float = 0.0) -> None:
    """Output and gradients within a few ulps of the largest of the terms they are summed from.

    ``least``: the absolute error allowed to grad_input, where it leaves its dtype's range.
    """
    y = scale_norm(x, g, eps)
    assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()
    assert ulps(y, reference.scale_norm(x, g, eps)) <= FORWARD_ULPS[x.dtype]

    grad = torch.randn(x.shape, dtype=torch.float64).to(x.dtype)
    dx, dg = _grads(x, g, grad, eps)
    wide = [t.detach().double().requires_grad_() for t in (x, g)]
    expected = torch.autograd.grad(reference.scale_norm(*wide, eps), wide, grad.double())
    with torch.no_grad():
        x_hat = reference.scale_norm(x, torch.ones(1), eps)
        factor = _rstd(x, eps) * g.double().abs().reshape(())
        products = (grad.double() * x_hat).abs()
        of_input = factor * (
            grad.double().abs().amax(-1, keepdim=True)
            + x_hat.abs().amax(-1, keepdim=True) * products.sum(-1, keepdim=True)
        )
    for result, want, terms, of in ((dx, expected[0], of_input, x), (dg, expected[1], products.sum(), g)):
        assert result.dtype == of.dtype and result.shape == of.shape
        # As test_values.check_gradients: 8 ulps of the terms, and for 16 bits the rounding at the store.
        acc = reference.accumulation(x.dtype)
        bound = 8 * reference.unit(acc) * terms + (least if of is x else 0.0)
        if result.dtype != acc:
            bound = bound + 0.51 * reference.unit(of.dtype) * want.abs() + torch.finfo(of.dtype).tiny
        assert ((result.double() - want).abs() <= bound).all(), (of.shape, result, want)


def _rstd(x: Tensor, eps: float) -> Tensor:
    """1 / max(length, eps) in float64."""
    largest = x.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return 1 / (largest * (x.double() / largest).norm(dim=-1, keepdim=True)).clamp_min(eps)


# ---- Values and gradients ------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("cols", COLS)
def test_forward_and_gradients(dtype: torch.dtype, cols: int) -> None:
    _check(_rows(5, cols, dtype) + 0.5, torch.tensor([cols**0.5], dtype=dtype))


@pytest.mark.parametrize(("x_dtype", "g_dtype"), [*itertools.product(DTYPES, DTYPES)])
def test_every_pair_of_dtypes_and_its_gradients(x_dtype: torch.dtype, g_dtype: torch.dtype) -> None:
    _check(_rows(7, 33, x_dtype), torch.tensor(-1.7, dtype=g_dtype))  # g of no dimension


@dtypes
def test_clamped_rows_and_their_gradients(dtype: torch.dtype) -> None:
    """Rows of zeros, of a hundredth of eps, and around it, among ordinary ones."""
    x = _rows(21, 40, dtype, 0.0, 0.01, 0.98, 1.02, 3.0)
    _check(x, torch.tensor([2.0], dtype=dtype), eps=1.0)
    dx, dg = _grads(torch.zeros(3, 5, dtype=dtype), torch.full((1,), 2.0, dtype=dtype), torch.ones(3, 5), 0.5)
    assert (dx == 4).all() and dg == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_clamp_is_known_from_the_saved_statistic(dtype: torch.dtype) -> None:
    """Backward tells a clamped row by its rstd: whatever eps is, however 1 / eps rounds."""
    g = torch.ones(1, dtype=dtype)
    for eps in (0.1 + torch.rand(200, dtype=torch.float64)).tolist():
        x = _rows(1, 9, dtype, 0.9 * eps)
        grad = torch.randn(1, 9, dtype=dtype)
        assert ulps(_grads(x, g, grad, eps)[0], grad.double() / eps) <= 1.5  # rstd and the product: 1 each
    x = _rows(1, 50, dtype)
    length = float(x.double().norm())
    for side in (-1, 1):  # 8 ulps beside the clamp
        _check(x, g, eps=length * (1 + side * 8 * reference.unit(dtype)))


@pytest.mark.parametrize("cols", [5, 64, 1000])
@pytest.mark.parametrize("eps", [1e-5, 1e-20])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-20, 1e20, 1e30, 3e38])
def test_extreme_rows_and_their_gradients(scale: float, eps: float, cols: int) -> None:
    """Squares, sums and fp32's least numbers under- and overflow; lengths and gradients do not."""
    x = torch.cat([_rows(4, cols, torch.float64).clamp(-1, 1) * scale, _rows(2, cols, torch.float64)]).float()
    _check(x, torch.tensor([3.0]), eps, least=torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
def test_extreme_rows_of_float64_and_their_gradients(scale: float) -> None:
    x = _rows(5, 33, torch.float64) * scale
    _check(x, torch.tensor([3.0], dtype=torch.float64), 1e-200, least=torch.finfo(torch.float64).tiny)


def test_infinity_and_nan_stay_in_their_row() -> None:
    x = torch.randn(5, 9)
    x[1, 3], x[2, 4] = torch.inf, torch.nan
    y = scale_norm(x, torch.ones(1))
    assert y[1, 3].isnan() and (y[1, :3] == 0).all() and y[2].isnan().all()
    assert (
        ulps(y[[0, 3, 4]], reference.scale_norm(x[[0, 3, 4]], torch.ones(1))) <= FORWARD_ULPS[torch.float32]
    )


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4), (0,)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    x, g = torch.randn(shape).requires_grad_(), torch.ones(1, requires_grad=True)
    y = scale_norm(x, g)
    dx, dg = torch.autograd.grad(y.sum(), (x, g))
    assert y.shape == dx.shape == shape and dg == 0


@pytest.mark.parametrize("g_dtype", HALVES)
def test_the_gradient_of_a_narrow_g_is_summed_wide(g_dtype: torch.dtype) -> None:
    """4096 columns of 1/64 make 64; added in 16 bits they would stop growing long before."""
    x = torch.ones(1, 4096)
    _, dg = _grads(x, torch.ones(1, dtype=g_dtype), torch.ones(1, 4096))
    assert dg.dtype == g_dtype and dg == 64


# ---- Guarantees ----------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("cols", [3, 33, 512, 1025])
def test_row_bits_do_not_depend_on_the_batch(dtype: torch.dtype, cols: int) -> None:
    x, grad, g = _rows(300, cols, dtype, 0.5, 2.0), _rows(300, cols, dtype), torch.tensor([1.5])
    y, dx = scale_norm(x, g, 1.0), _grads(x, g, grad, 1.0)[0]
    for i in (0, 17, 299):
        assert torch.equal(y[i], scale_norm(x[i], g, 1.0))
        assert torch.equal(dx[i : i + 1], _grads(x[i : i + 1], g, grad[i : i + 1], 1.0)[0])
    for rows in (1, 2, 3, 5, 16, 257):
        assert torch.equal(y[:rows], scale_norm(x[:rows], g, 1.0))
        assert torch.equal(dx[:rows], _grads(x[:rows], g, grad[:rows], 1.0)[0])


@pytest.mark.parametrize("shape", [(3000, 100), (3, 70000)])  # from 32768 on ATen splits a sum by threads
def test_gradient_bits_do_not_depend_on_the_threads(shape: tuple[int, int]) -> None:
    x, grad, g = torch.randn(shape), torch.randn(shape), torch.ones(1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(_grads(x, g, grad))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@dtypes
def test_strides_and_gradients_of_any(dtype: torch.dtype) -> None:
    x, grad = (torch.randn(2, 3, 4, 5, 19, dtype=torch.float64).to(dtype) for _ in range(2))
    g = torch.tensor([1.5], dtype=dtype)
    y, grads = scale_norm(x, g), _grads(x, g, grad)
    for name, strided in _strided_views(x).items():
        assert torch.equal(scale_norm(strided, g), y), name
        assert all(torch.equal(a, b) for a, b in zip(_grads(strided, g, grad), grads, strict=True)), name
    for name, strided in _strided_views(grad).items():
        assert all(torch.equal(a, b) for a, b in zip(_grads(x, g, strided), grads, strict=True)), name
    ones = torch.ones(1, dtype=dtype).expand(x.shape)  # zero strides, as sum().backward() makes them
    expected = _grads(x, g, ones.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(_grads(x, g, ones), expected, strict=True))


def test_nothing_is_written_to_and_only_what_is_asked_for_is_kept() -> None:
    x, g, grad = torch.randn(4, 9), torch.ones(1), torch.randn(4, 9)
    before = [t.clone() for t in (x, g, grad)]
    _grads(x, g, grad)
    assert all(torch.equal(a, b) for a, b in zip((x, g, grad), before, strict=True))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = scale_norm(x.requires_grad_(), g.requires_grad_())
        kept = len(saved)
        with torch.no_grad():
            scale_norm(x, g)
        assert len(saved) == kept
    assert sorted(tuple(t.shape) for t in saved) == [(4,), (4, 9), (9,)]  # rstd, input, g expanded
    assert y.grad_fn.name() == "ScaleRowsBackward"
    y = scale_norm(x, g.detach())
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert not scale_norm(x.detach(), g.detach()).requires_grad


# ---- Derivatives and transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 3, 5), (6,), (4, 1)])
@pytest.mark.parametrize("g_shape", [(1,), ()])
def test_gradcheck(shape: tuple[int, ...], g_shape: tuple[int, ...]) -> None:
    """Reverse, forward and both batched, of ordinary and clamped rows."""
    rows = torch.Size(shape[:-1]).numel()
    x = _rows(rows, shape[-1], torch.float64, 3.0, 0.3).reshape(shape).requires_grad_()
    g = torch.full(g_shape, 1.5, dtype=torch.float64, requires_grad=True)
    f = lambda x, g: scale_norm(x, g, 1.0)  # noqa: E731
    assert gradcheck(
        f, (x, g), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, (x, g), check_fwd_over_rev=True)


@pytest.mark.filterwarnings("error:There is a performance drop")  # vmap without a rule is a loop
def test_torch_func() -> None:
    """jvp, jacobians both ways, hessian, vmap of grad."""
    inputs = (_rows(4, 5, torch.float64, 3.0, 0.3), torch.tensor([1.5], dtype=torch.float64))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    f = lambda x, g: scale_norm(x, g, 1.0)  # noqa: E731
    r = lambda x, g: reference.scale_norm(x, g, 1.0)  # noqa: E731

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *a: function(*a).sin().sum()

    close, func = torch.testing.assert_close, torch.func
    close(func.jvp(f, inputs, tangents), func.jvp(r, inputs, tangents))
    close(func.jacrev(f, (0, 1))(*inputs), func.jacrev(r, (0, 1))(*inputs))
    close(func.jacfwd(f, (0, 1))(*inputs), func.jacfwd(r, (0, 1))(*inputs))
    close(func.hessian(loss(f), (0, 1))(*inputs), func.hessian(loss(r), (0, 1))(*inputs))
    batched = (torch.stack([inputs[0], 2 * inputs[0]]), torch.tensor([[1.5], [-2.0]], dtype=torch.float64))
    for dims in ((0, 0), (0, None), (None, 0)):
        given = tuple(b if d == 0 else t for b, t, d in zip(batched, inputs, dims, strict=True))
        close(torch.vmap(f, dims)(*given), torch.vmap(r, dims)(*given))
        grads = torch.vmap(func.grad(loss(f), (0, 1)), dims)(*given)
        close(grads, torch.vmap(func.grad(loss(r), (0, 1)), dims)(*given))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@traces
def test_opcheck(trace_all: bool, requires_grad: bool, dtype: torch.dtype) -> None:
    traced = trace_all or dtype == torch.float32
    x = _rows(6, 5, dtype, 3.0, 0.3).reshape(3, 2, 5).requires_grad_(requires_grad)
    g = torch.tensor([1.5], dtype=dtype, requires_grad=requires_grad)
    w = torch.randn(5, dtype=dtype, requires_grad=requires_grad)
    opcheck(ops.scale_norm.default, (x, g, 1.0), traced=traced)
    opcheck(ops._scale_rows.default, (x, [5], w, 1.0), traced=traced)
    opcheck(ops._scale_rows_forward.default, (x, [5], w, 1.0), traced=traced)
    _, rstd = ops._scale_rows_forward(x.detach(), [5], w.detach(), 1.0)
    grad = torch.randn(3, 2, 5, dtype=dtype, requires_grad=requires_grad)
    # Double backward in bf16 repeats roundings in another order: opcheck compares too closely there.
    if not (requires_grad and dtype == torch.bfloat16):
        for mask in ([True, True], [True, False], [False, True]):
            arguments = (grad, x, [5], rstd, w, 1.0, mask)
            chosen = trace_all or (traced and mask != [True, False])
            opcheck(ops._scale_rows_backward.default, arguments, traced=chosen)


class _Model(torch.nn.Module):
    def __init__(self, **kw: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)
        self.norm = fusednorm.ScaleNorm(16, **kw)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


def _loss_and_grads(model: Callable[[Tensor], Tensor], parameters: list, x: Tensor) -> tuple[Tensor, ...]:
    loss = model(x).square().sum()
    return (loss, *torch.autograd.grad(loss, parameters))


def test_compile_without_breaks() -> None:
    torch.compiler.reset()
    model, x = _Model(), torch.randn(4, 8)
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = _loss_and_grads(model, parameters, x)
    torch.testing.assert_close(_loss_and_grads(compiled, parameters, x), expected)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_compiled_batches_of_any_size() -> None:
    torch.compiler.reset()
    model = _Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (3, 7):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(compiled(x), model(x))


def test_compiled_autograd() -> None:
    """Two norms that differ in eps alone: what a graph is cached by tells them apart."""
    torch.compiler.reset()
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8)
    for model in (_Model(), _Model(eps=50.0)):
        expected = _loss_and_grads(model, list(model.parameters()), x)[1:]
        with torch._dynamo.compiled_autograd._enable(compiler):
            model(x).square().sum().backward()
        for p, want in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, want)


def test_compiled_autograd_tells_it_from_rms_norm() -> None:
    torch.compiler.reset()
    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    x, w = torch.randn(4, 8), torch.ones(8)
    for op in (ops.rms_norm, ops._scale_rows):
        ours, plain = (x.clone().requires_grad_() for _ in range(2))
        (want,) = torch.autograd.grad(op(plain, [8], w, 1e-5).sin().sum(), plain)
        with torch._dynamo.compiled_autograd._enable(compiler):
            op(ours, [8], w, 1e-5).sin().sum().backward()
        torch.testing.assert_close(ours.grad, want)


def test_export_and_decompositions() -> None:
    model, x = _Model(eps=2.0), torch.randn(4, 8)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    decomposed = program.run_decompositions(fusednorm.decompositions())
    names = [str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"]
    assert not any("fusednorm" in name for name in names), names
    torch.testing.assert_close(decomposed.module()(x), model(x))


def test_dtensor_with_gradients() -> None:
    """Rows may stay sharded; one process makes a mesh of one (rules: distributed.py)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    x, module = torch.randn(4, 8), fusednorm.ScaleNorm(8)
    expected = _loss_and_grads(module, list(module.parameters()), x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_module(copy.deepcopy(module), mesh)
        out = sharded(distribute_tensor(x, mesh, [Shard(0)]))
        assert out.placements == (Shard(0),)
        loss = out.square().sum()
        grad = torch.autograd.grad(loss, list(sharded.parameters()))[0]
        for got, want in zip((loss, grad), expected, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)
    finally:
        dist.destroy_process_group()


def test_meta_tensors() -> None:
    y = scale_norm(torch.empty(3, 8, device="meta", dtype=torch.bfloat16), torch.empty(1, device="meta"))
    assert y.is_meta and y.shape == (3, 8) and y.dtype == torch.bfloat16


# ---- Errors --------------------------------------------------------------------------------------------

X, G = torch.ones(2, 4), torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, torch.ones(2)), r"g: expected a tensor of one element, got shape \[2\]"),
        ((X, torch.ones(0)), r"g: expected a tensor of one element, got shape \[0\]"),
        ((X, torch.ones(1, dtype=torch.int64)), "g: expected dtype float64, .*got Long"),
        ((X.int(), G), "input: expected dtype float64, .*got Int"),
        ((X, torch.ones(1, device="meta")), "g: expected on the input's device cpu, got meta"),
        ((torch.tensor(1.0), G), r"input: expected shape \[\*, N\].*got \[\]"),
        ((X.to_sparse(), G), r"input: expected a dense \(strided\) tensor, got Sparse"),
        ((torch.nested.nested_tensor([X, X]), G), "input: expected a dense .* got a nested tensor"),
        ((X, G, 0.0), "eps: expected a finite number above 0, got 0"),
        ((X, G, -1.0), "eps: expected a finite number above 0, got -1"),
        ((X, G, float("nan")), "eps: expected a finite number above 0, got nan"),
        ((X, G, float("inf")), "eps: expected a finite number above 0, got inf"),
    ],
)
def test_errors(arguments: tuple[Any, ...], message: str) -> None:
    for function in (scale_norm, ops.scale_norm):
        with pytest.raises(RuntimeError, match=f"fusednorm::scale_norm: {message}"):
            function(*arguments)


def test_errors_of_the_rows_operator() -> None:
    for eps in (0.0, float("nan")):
        with pytest.raises(
            RuntimeError, match="fusednorm::_scale_rows: eps: expected a finite number above 0"
        ):
            ops._scale_rows(X, [4], None, eps)


# ---- The module ----------------------------------------------------------------------------------------


@dtypes
def test_module(dtype: torch.dtype) -> None:
    module = fusednorm.ScaleNorm(16, eps=0.5, dtype=dtype)
    assert module.g.shape == (1,) and module.g.dtype == dtype and module.g == 4
    assert repr(module) == "ScaleNorm(16, eps=0.5)"
    with torch.no_grad():
        module.g.fill_(1.5)
    x = _rows(3, 16, dtype, 0.1, 2.0)
    expected = scale_norm(x, module.g, 0.5)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), expected)
    other = fusednorm.ScaleNorm(16, eps=0.5, dtype=dtype)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), expected)
    module.reset_parameters()
    assert module.g == 4


def test_module_takes_a_scalar_from_a_checkpoint() -> None:
    module, checkpoint = torch.nn.Sequential(fusednorm.ScaleNorm(16)), {"0.g": torch.tensor(2.5)}
    module.load_state_dict(checkpoint)
    assert module[0].g == 2.5 and checkpoint["0.g"].dim() == 0


def test_module_errors() -> None:
    with pytest.raises(ValueError, match="fusednorm.ScaleNorm: dim: expected a positive number, got 0"):
        fusednorm.ScaleNorm(0)
    for eps in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="fusednorm.ScaleNorm: eps: expected a finite number above 0"):
            fusednorm.ScaleNorm(4, eps)
    for x in (torch.ones(2, 5), torch.tensor(1.0)):
        message = r"fusednorm.ScaleNorm: input: expected shape \[\*, 4\], got \["
        with pytest.raises(RuntimeError, match=message):
            fusednorm.ScaleNorm(4)(x)
