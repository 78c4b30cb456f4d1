"""GroupNorm and InstanceNorm: values, formats, guarantees, transforms, modules, errors.

What concerns both is tested here: InstanceNorm is GroupNorm with a group for each channel.
"""

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import fusednorm
import reference
from conftest import TEST_DEVICE, of_the_cpu
from fusednorm.functional import group_norm
from reference import DTYPES, ulps
from torch_checks import opcheck, traces

# As test_values.FORWARD_ULPS: fp32 the statistics' own error, fp64 twice that (the reference is rounded as
# often), 16 bits one rounding at the store.
FORWARD_ULPS = {torch.float64: 8.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}

# Groups of 1, of C, and between; C / G on both sides of a vector and of several; odd positions; short rows
# and long ones, in channels last past one block of positions.
SHAPES = [
    ((3, 6), 2),
    ((3, 40), 1),
    ((2, 12, 5), 3),
    ((2, 33, 17), 33),
    ((4, 7, 1), 1),
    ((2, 8, 7, 9), 8),
    ((2, 8, 7, 9), 1),
    ((3, 21, 1, 13), 3),
    ((2, 64, 3, 3), 32),
    ((2, 320, 5, 7), 32),
    ((2, 66, 9, 5), 2),
    ((5, 20, 1, 1), 5),
    ((1, 6, 131, 67), 2),
    ((2, 3, 65, 33), 3),
    ((1, 514, 5, 9), 2),
    ((2, 10, 3, 5, 7), 5),
    ((1, 16, 9, 1, 33), 4),
]
IDS = [f"{'x'.join(map(str, shape))}-{groups}" for shape, groups in SHAPES]


def _to_format(x: Tensor, channels_last: bool) -> Tensor:
    """Dense channels last; in 1-D, which has no such format, the transposed view of [N, L, C]."""
    if not channels_last or x.dim() == 2:
        return x.contiguous()
    if x.dim() == 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous(memory_format=FORMATS[x.dim()])


def _problem(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    channels_last: bool = False,
    parameter_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_weight, of_bias = parameter_dtypes or (dtype, dtype)
    x = (offset + torch.randn(shape, dtype=torch.float64)).to(dtype)
    weight = (1 + 0.25 * torch.randn(shape[1], dtype=torch.float64)).to(of_weight)
    bias = torch.randn(shape[1], dtype=torch.float64).to(of_bias)
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    return _to_format(x, channels_last), weight, bias, _to_format(grad, channels_last)


def _grads(x: Tensor, groups: int, w: Tensor, b: Tensor, g: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    return torch.autograd.grad(group_norm(leaves[0], groups, *leaves[1:], eps), leaves, g)


def _group_ulps(y: Tensor, expected: Tensor, groups: int) -> float:
    rows = (y.shape[0] * groups, -1)
    return ulps(y.reshape(rows), expected.reshape(rows))


def check(x: Tensor, groups: int, w: Tensor, b: Tensor, g: Tensor, eps: float = 1e-5) -> None:
    """Output and gradients against the float64 formula, with and without weight and bias.

    Gradients within a few ulps of the largest of the terms they are summed from (the terms may cancel), and
    half an ulp of their own where they are rounded to fewer bits; as test_values.check_gradients.
    """
    for weight, bias in ((w, b), (None, None), (w, None), (None, b)):
        y = group_norm(x, groups, weight, bias, eps)
        assert y.dtype == x.dtype
        expected = reference.group_norm(x, groups, weight, bias, eps)
        assert _group_ulps(y, expected, groups) <= FORWARD_ULPS[x.dtype]

    grads = _grads(x, groups, w, b, g, eps)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    wants = torch.autograd.grad(reference.group_norm(wide[0], groups, *wide[1:], eps), wide, g.double())
    per_channel, rows = (-1,) + (1,) * (x.dim() - 2), (x.shape[0], groups, -1)
    over = [d for d in range(x.dim()) if d != 1]
    x_hat, d = reference.group_norm(x, groups, eps=eps), x.double().reshape(rows)
    d = d - d.mean(-1, keepdim=True)
    rstd = ((d - d.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + eps).rsqrt()
    gw = (g.double() * w.double().reshape(per_channel)).abs().reshape(rows)
    terms = [
        (rstd * gw.amax(-1, keepdim=True)).expand(gw.shape).reshape(x.shape),
        (g.double() * x_hat.abs().clamp_min(1)).abs().sum(over),
        g.double().abs().sum(over),
    ]
    for grad, want, scale, of in zip(grads, wants, terms, (x, w, b), strict=True):
        assert grad.dtype == of.dtype and grad.shape == of.shape
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        bound = 8 * reference.unit(acc) * scale
        if grad.dtype != acc:
            bound = bound + 0.51 * reference.unit(grad.dtype) * want.abs() + torch.finfo(grad.dtype).tiny
        error = (grad.double() - want).abs()
        assert (error <= bound).all(), (of.shape, float((error / bound).max()))


@of_the_cpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (2, 64, 104, 104)),
        (torch.float32, (2, 66, 103, 103)),
        (torch.bfloat16, (2, 64, 205, 204)),
    ],
)
def test_beyond_the_caches(dtype: torch.dtype, shape: tuple[int, ...], channels_last: bool) -> None:
    """Where gradients are streamed past the caches: runs on whole vectors, and on none."""
    x, w, b, g = _problem(shape, dtype, channels_last)
    check(x, 2, w, b, g)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=IDS)
def test_values_and_grads(shape: tuple, groups: int, dtype: torch.dtype, channels_last: bool) -> None:
    x, w, b, g = _problem(shape, dtype, channels_last, offset=0.5)
    check(x, groups, w, b, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes_and_grads(dtype: torch.dtype) -> None:
    for of_weight, of_bias in itertools.product(DTYPES, DTYPES):
        for channels_last in (False, True):
            x, w, b, g = _problem((2, 12, 3, 7), dtype, channels_last, (of_weight, of_bias))
            check(x, 3, w, b, g)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [((2, 12, 5, 7), 3), ((1, 6, 67, 33), 2), ((2, 70, 9, 9), 35)])
def test_large_offset_and_grads(shape: tuple, groups: int, channels_last: bool) -> None:
    """Field report B11, for groups: a mean up to 1e6 standard deviations away."""
    for offset in (1e4, 1e6):
        x, w, b, g = _problem(shape, torch.float32, channels_last, offset=offset)
        check(x, groups, w, b, g)
        x[:, ::2] -= 2 * offset  # channels of one group far apart: their deviations are the variance
        if shape[1] // groups > 1:
            # x_hat is all but +-1. Weights would move it below a power of two, where ulps are half as large.
            assert _group_ulps(group_norm(x, groups), reference.group_norm(x, groups), groups) <= 4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e18, 1e30])
def test_extreme_rows_and_grads(scale: float, channels_last: bool) -> None:
    """Field report B83: squares over- or underflow fp32. Only their group is redone. eps 0, so no shelter."""
    for shape, groups in (((4, 6, 3, 5), 3), ((2, 40, 17, 9), 2)):
        x, w, b, g = _problem(shape, torch.float32, channels_last)
        plain = group_norm(x, groups, w, b, 0.0)
        x[0] *= scale
        y = group_norm(x, groups, w, b, 0.0)
        assert _group_ulps(y, reference.group_norm(x, groups, w, b, 0.0), groups) <= 4
        assert torch.equal(y[1:], plain[1:])
        dx, dw, db = _grads(x, groups, w, b, g, 0.0)
        wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
        wants = torch.autograd.grad(reference.group_norm(wide[0], groups, *wide[1:], 0.0), wide, g.double())
        # Sums of terms about as large as themselves, over at most 640 elements a row: 32 ulps.
        assert _group_ulps(dx, wants[0], groups) <= 32
        for grad, want in ((dw, wants[1]), (db, wants[2])):
            assert ulps(grad, want) <= 32


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_give_exactly_the_bias(dtype: torch.dtype, channels_last: bool) -> None:
    """Field report B55."""
    for value in (3e4, 0.1, 0.0):
        for shape, groups in (((2, 12, 5, 7), 3), ((1, 40, 1, 1), 40)):
            x = _to_format(torch.full(shape, value, dtype=dtype), channels_last)
            w, b = torch.full((shape[1],), 5.0, dtype=dtype), torch.randn(shape[1]).to(dtype)
            assert torch.equal(group_norm(x, groups, w, b), b.reshape(-1, 1, 1).expand(shape))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_stays_in_its_group(bad: float, channels_last: bool) -> None:
    x, w, b, g = _problem((2, 12, 3, 5), torch.float32, channels_last)
    clean, clean_dx = group_norm(x, 4, w, b), _grads(x, 4, w, b, g)[0]
    x[1, 4, 2, 1] = bad
    y, dx = group_norm(x, 4, w, b), _grads(x, 4, w, b, g)[0]
    there = torch.zeros(2, 12, dtype=torch.bool)
    there[1, 3:6] = True
    assert torch.equal(y[~there], clean[~there]) and torch.equal(dx[~there], clean_dx[~there])
    assert y[there].isnan().any() and dx[there].isnan().all()


# ---- Memory ------------------------------------------------------------------------------------------


def test_memory_format_is_kept() -> None:
    for shape in ((2, 6, 5, 7), (2, 6, 3, 5, 7), (2, 6, 1, 1), (2, 1, 5, 7)):
        for channels_last in (False, True):
            x, w, b, g = _problem(shape, torch.float32, channels_last)
            y, dx = group_norm(x, 1, w, b), _grads(x, 1, w, b, g)[0]
            theirs = F.group_norm(x, 1, w, b)
            assert y.stride() == theirs.stride() and dx.stride() == y.stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_strides_give_the_same_bits(dtype: torch.dtype) -> None:
    """Any view, of the input or of its gradient, in either format."""
    x, w, b, g = _problem((3, 12, 5, 7), dtype)
    y, grads = group_norm(x, 4, w, b), _grads(x, 4, w, b, g)

    def views(t: Tensor) -> list[Tensor]:
        gaps = torch.zeros(3, 14, 9, 20, dtype=dtype)[:, 1:-1, 2:-2, 3:-3:2].copy_(t)
        turned = t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
        return [gaps, turned, t.flip(0).flip(0)]

    for view in views(x):
        assert torch.equal(view, x) and torch.equal(group_norm(view, 4, w, b), y)
        assert all(torch.equal(a, e) for a, e in zip(_grads(view, 4, w, b, g), grads, strict=True))
    for view in views(g):
        assert all(torch.equal(a, e) for a, e in zip(_grads(x, 4, w, b, view), grads, strict=True))
    strided = (torch.stack([p, p], 1)[:, 0] for p in (w, b))
    assert torch.equal(group_norm(x, 4, *strided), y)
    for channels_last in (False, True):
        x, g = _to_format(x, channels_last), torch.randn(1, 12, 1, 1).to(dtype)
        expected = _grads(x, 4, w, b, _to_format(g.expand(x.shape).clone(), channels_last))
        got = _grads(x, 4, w, b, g.expand(x.shape))
        assert all(torch.equal(a, e) for a, e in zip(got, expected, strict=True))
        (other,) = (_to_format(t, not channels_last) for t in (x,))
        assert torch.equal(_grads(x, 4, w, b, other)[0], _grads(x, 4, w, b, x)[0])


@pytest.mark.parametrize("shape", [(0, 6), (0, 6, 5, 7), (2, 6, 0), (2, 6, 0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_grads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, b, g = _problem(shape, dtype)
    y, (dx, dw, db) = group_norm(x, 2, w, b), _grads(x, 2, w, b, g)
    assert y.shape == dx.shape == shape and not dw.any() and not db.any() and dw.shape == (6,)


def test_inputs_stay_as_they_are() -> None:
    for channels_last in (False, True):
        given = _problem((2, 12, 5, 7), torch.bfloat16, channels_last)
        kept = [t.clone() for t in given]
        x, w, b, g = given
        group_norm(x, 3, w, b)
        _grads(x, 3, w, b, g)
        assert all(torch.equal(a, e) for a, e in zip(given, kept, strict=True))


# ---- Bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((9, 12, 7, 9), 3),
        ((2, 64, 33, 31), 32),
        ((1, 6, 131, 67), 1),
        ((3, 320, 9, 9), 32),
        ((40, 8, 1, 3), 8),
    ],
)
def test_threads_and_batch_do_not_change_bits(
    shape: tuple, groups: int, dtype: torch.dtype, channels_last: bool
) -> None:
    x, w, b, g = _problem(shape, dtype, channels_last)
    torch.set_num_threads(1)
    y, grads = group_norm(x, groups, w, b), _grads(x, groups, w, b, g)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(group_norm(x, groups, w, b), y)
        got = _grads(x, groups, w, b, g)
        assert all(torch.equal(a, e) for a, e in zip(got, grads, strict=True))
    for n in (0, shape[0] - 1):
        alone = x[n : n + 1], g[n : n + 1]
        assert torch.equal(group_norm(alone[0], groups, w, b), y[n : n + 1])
        assert torch.equal(_grads(alone[0], groups, w, b, alone[1])[0], grads[0][n : n + 1])


def test_parameter_gradients_accumulate_in_fp32() -> None:
    """10000 equal terms of 1: in bf16 a sum stops at 256."""
    for channels_last in (False, True):
        x, w, b, _ = _problem((100, 4, 10, 10), torch.bfloat16, channels_last)
        _, _, db = _grads(x, 2, w, b, torch.ones_like(x))
        assert db.tolist() == [torch.tensor(1e4).to(torch.bfloat16).item()] * 4


# ---- Autograd ----------------------------------------------------------------------------------------


def test_every_combination_of_requires_grad() -> None:
    for channels_last in (False, True):
        x, w, b, g = _problem((2, 6, 3, 5), torch.float32, channels_last)
        expected = _grads(x, 2, w, b, g)
        for wanted in itertools.product([False, True], repeat=3):
            inputs = [t.detach().requires_grad_(r) for t, r in zip((x, w, b), wanted, strict=True)]
            y = group_norm(inputs[0], 2, *inputs[1:])
            assert y.requires_grad == any(wanted)
            if any(wanted):
                y.backward(g)
            for t, want, e in zip(inputs, wanted, expected, strict=True):
                assert (t.grad is not None) == want and (t.grad is None or torch.equal(t.grad, e))


def test_saved_tensors_for_grad() -> None:
    """Field report B89: the input in its own dtype, the weight, and the groups' statistics; no copies."""
    x, w, b, _ = _problem((4, 6, 5, 5), torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        group_norm(x.requires_grad_(), 2, w.requires_grad_(), b.requires_grad_())
    kept = [t for t in saved if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [(torch.float32, (4, 2))] * 2
    with torch.no_grad():
        assert not group_norm(x, 2, w, b).requires_grad


@pytest.mark.parametrize("shape", [(2, 6, 3), (2, 4, 2, 3), (3, 4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradcheck(shape: tuple[int, ...], channels_last: bool) -> None:
    x, w, b, _ = _problem(shape, torch.float64, channels_last)
    inputs = [t.requires_grad_() for t in (x, w, b)]

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return group_norm(x, 2, w, b, 0.1)

    assert gradcheck(
        f, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, inputs, check_fwd_over_rev=True)


def test_torch_func_and_grads() -> None:
    """jvp, jacobians both ways, hessian, vmap of values and of grad; also over samples with their weights."""
    inputs = _problem((2, 4, 3), torch.float64)[:3]
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return group_norm(x, 2, w, b, 0.1)

    def r(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reference.group_norm(x, 2, w, b, 0.1)

    close, argnums = torch.testing.assert_close, (0, 1, 2)
    close(torch.func.jvp(f, inputs, tangents), torch.func.jvp(r, inputs, tangents))
    close(torch.func.jacrev(f, argnums)(*inputs), torch.func.jacrev(r, argnums)(*inputs))
    close(torch.func.jacfwd(f, argnums)(*inputs), torch.func.jacfwd(r, argnums)(*inputs))
    loss_f, loss_r = (lambda *a, h=h: h(*a).sin().sum() for h in (f, r))
    close(torch.func.hessian(loss_f, argnums)(*inputs), torch.func.hessian(loss_r, argnums)(*inputs))
    batched = tuple(torch.randn(3, *t.shape, dtype=t.dtype) for t in inputs)
    for dims in ((0, 0, 0), (0, None, None), (None, 0, None)):
        given = tuple(s if d == 0 else t for s, t, d in zip(batched, inputs, dims, strict=True))
        close(torch.vmap(f, dims)(*given), torch.vmap(r, dims)(*given))
        grads = torch.vmap(torch.func.grad(loss_f, argnums), dims)(*given)
        close(grads, torch.vmap(torch.func.grad(loss_r, argnums), dims)(*given))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decomposed_routes_are_as_right_as_the_kernels(dtype: torch.dtype, offset: float) -> None:
    """vmap, jvp and create_graph, by layer_norm and ATen (the CUDA key runs that too), in both formats."""
    for channels_last in (False, True):
        x, w, b, g = _problem((2, 12, 5, 7), dtype, channels_last, (torch.float32,) * 2, offset)
        expected = reference.group_norm(x, 3, w, b)

        def f(t: Tensor, w: Tensor = w, b: Tensor = b) -> Tensor:
            return group_norm(t, 3, w, b)

        assert _group_ulps(torch.vmap(f)(x.unsqueeze(0))[0], expected, 3) <= FORWARD_ULPS[dtype]
        y, _ = torch.func.jvp(f, (x,), (torch.zeros_like(x),))
        assert _group_ulps(y, expected, 3) <= FORWARD_ULPS[dtype] and y.stride() == x.stride()
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
        grads = torch.autograd.grad(f(*leaves), leaves, g, create_graph=True)
        wants = torch.autograd.grad(reference.group_norm(wide[0], 3, *wide[1:]), wide, g.double())
        assert grads[0].stride() == x.stride()
        assert _group_ulps(grads[0], wants[0], 3) <= 4
        assert ulps(grads[1], wants[1]) <= 8 and ulps(grads[2], wants[2]) <= 8  # sums of 70 terms


# ---- torch's checks, compile -------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@traces
def test_opcheck(trace_all: bool, requires_grad: bool, channels_last: bool) -> None:
    ops = torch.ops.fusednorm
    # The backward's own backward is the costliest to trace, and one format's is the other's.
    some = [(True, True, True)] if requires_grad else [(True, True, True), (False, True, False)]
    some = [] if requires_grad and channels_last else some
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, g = _problem((2, 6, 3, 5), dtype, channels_last)
        inputs = [t.requires_grad_(requires_grad) for t in (x, w, b)]
        traced = trace_all or dtype == torch.float32
        opcheck(ops.group_norm.default, (x, 3, w, b, 0.1), traced=traced)
        opcheck(ops.group_norm_forward.default, (x, 3, *inputs[1:], 0.1), traced=traced)
        with torch.no_grad():
            statistics = ops.group_norm_forward(x, 3, w, b, 0.1)[1:]
        if requires_grad and dtype == torch.bfloat16:
            continue  # double backward repeats roundings in another order: opcheck compares too closely
        g.requires_grad_(requires_grad)
        for mask in itertools.product([False, True], repeat=3):
            if any(mask):
                arguments = (g, x, 3, *statistics, w, b, 0.1, list(mask))
                chosen = trace_all or (traced and mask in some)
                opcheck(ops.group_norm_backward.default, arguments, traced=chosen)


@pytest.mark.parametrize("channels_last", [False, True])
def test_compile(channels_last: bool) -> None:
    """Without a break, the same bits, the same format, forward and backward."""
    torch.compiler.reset()
    module = fusednorm.GroupNorm(3, 12)
    x, _, _, g = _problem((2, 12, 5, 7), torch.float32, channels_last)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_(), *module.parameters()]
    (y, grads), (expected, wants) = (
        (output, torch.autograd.grad(output, leaves, g)) for output in (compiled(x), module(x))
    )
    assert torch.equal(y, expected) and y.stride() == expected.stride()
    assert all(torch.equal(a, e) for a, e in zip(grads, wants, strict=True))


def test_dynamic_batch_compiles() -> None:
    torch.compiler.reset()
    module = fusednorm.GroupNorm(3, 12)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, size in ((2, 5), (3, 7), (5, 9)):
        x = torch.randn(n, 12, size, size)
        assert torch.equal(compiled(x), module(x))


# ---- Modules -----------------------------------------------------------------------------------------


def test_module_is_torchs() -> None:
    """state_dicts both ways, representation, values, a module that became ours by its class, copies."""
    for kw in ({}, {"affine": False}, {"eps": 1e-3}):
        ours, theirs = fusednorm.GroupNorm(3, 12, **kw), nn.GroupNorm(3, 12, **kw)
        for p in theirs.parameters():
            nn.init.normal_(p)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert repr(ours) == repr(theirs) and isinstance(ours, nn.GroupNorm)
        x = torch.randn(2, 12, 5, 7)
        torch.testing.assert_close(ours(x), theirs(x))
        theirs.__class__ = fusednorm.GroupNorm
        for twin in (theirs, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(twin(x), ours(x))
    half = fusednorm.GroupNorm(3, 12, dtype=torch.bfloat16)
    assert half(torch.randn(2, 12, 5)).dtype == torch.float32 and half.weight.dtype == torch.bfloat16


# ---- Errors ------------------------------------------------------------------------------------------

X, W = torch.randn(2, 6, 5), torch.ones(6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, 4, W), r"num_groups: expected a divisor of the 6 channels .*\[2, 6, 5\], got 4"),
        ((X, 0, W), r"num_groups: expected a positive number, got 0"),
        ((X, -2, W), r"num_groups: expected a positive number, got -2"),
        ((torch.randn(6), 2, W), r"input: expected shape \[N, C, \*\].*got \[6\]"),
        ((torch.tensor(1.0), 1), r"input: expected shape \[N, C, \*\].*got \[\]"),
        ((X, 2, torch.ones(5)), r"weight: expected shape \[6\].*got \[5\]"),
        ((X, 2, torch.ones(6, 1)), r"weight: expected shape \[6\].*got \[6, 1\]"),
        ((X, 2, W, torch.ones(1)), r"bias: expected shape \[6\].*got \[1\]"),
        ((X.long(), 2), r"input: expected dtype float64, float32, .*got"),
        ((X, 2, W.to(torch.complex64)), r"weight: expected dtype float64, float32, .*got"),
        ((X, 2, W.to("meta")), r"weight: expected on the input's device .*got meta"),
        ((X, 2, W, None, float("nan")), r"eps: expected a finite number, got nan"),
        ((X, 2, W, None, float("inf")), r"eps: expected a finite number, got inf"),
    ],
)  # fmt: skip
def test_bad_input(arguments: tuple, message: str) -> None:
    if TEST_DEVICE:
        pytest.skip("messages are the same on every device; these tensors are the CPU's")
    statistics = (torch.zeros(2, 2), torch.ones(2, 2))
    x, groups, weight, bias, eps = (*arguments, *(None, None, 1e-5)[len(arguments) - 2 :])
    ops = torch.ops.fusednorm
    for call in (
        lambda: group_norm(*arguments),
        lambda: ops.group_norm_forward(*arguments),
        lambda: ops.group_norm_backward(x, x, groups, *statistics, weight, bias, eps, [True] * 3),
    ):
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context(), pytest.raises(RuntimeError, match=r"fusednorm::group_norm\w*: " + message):
                call()


def test_bad_input_of_backward() -> None:
    backward = torch.ops.fusednorm.group_norm_backward
    good = {"g": X, "x": X, "mean": torch.zeros(2, 2), "rstd": torch.ones(2, 2)}
    for change, message in [
        ({"g": X[:1]}, r"grad_output: expected shape \[2, 6, 5\].*got \[1, 6, 5\]"),
        ({"g": X.double()}, r"grad_output: expected the input's dtype Float or a narrower one, got Double"),
        ({"mean": torch.zeros(2, 3)}, r"mean: expected shape \[2, 2\].*got \[2, 3\]"),
        ({"rstd": torch.ones(2)}, r"rstd: expected shape \[2, 2\].*got \[2\]"),
        ({"rstd": torch.ones(2, 2).double()}, r"rstd: expected dtype Float, got Double"),
    ]:
        a = good | change
        with pytest.raises(RuntimeError, match=r"fusednorm::group_norm_backward: " + message):
            backward(a["g"], a["x"], 2, a["mean"], a["rstd"], W, None, 1e-5, [True, True, False])


def test_layouts_without_a_kernel() -> None:
    """Field report B38: refused by name."""
    x = torch.randn(2, 6)
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    for bad, what in [
        (x.to_sparse(), "Sparse"),
        (x.to_sparse_csr(), "SparseCsr"),
        (nested, "nested tensor"),
        (quantized, "quantized"),
    ]:
        for call in (group_norm, torch.ops.fusednorm.group_norm, torch.ops.fusednorm.group_norm_forward):
            with pytest.raises(
                RuntimeError, match=rf"fusednorm::group_norm.*input: expected a dense.*{what}"
            ):
                call(bad, 2)
    with pytest.raises(RuntimeError, match=r"weight: expected a dense \(strided\) tensor, got"):
        group_norm(x, 2, W.to_sparse())


def test_nested_and_module_errors() -> None:
    nested = torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="fusednorm::group_norm: input: expected a dense .*nested"):
        group_norm(nested, 2)
    with pytest.raises(ValueError, match="divisible"):
        fusednorm.GroupNorm(4, 6)


def test_the_fast_entry_steps_aside() -> None:
    """A subclass stays one, a mode sees the call."""

    class Sub(torch.Tensor):
        pass

    x, seen = torch.randn(2, 6, 5), []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    assert type(fusednorm.functional.group_norm(x.as_subclass(Sub), 3)) is Sub
    with Mode():
        fusednorm.functional.group_norm(x, 3)
    assert any("fusednorm.group_norm" in name for name in seen)
