"""What only a GPU can show: values by every kernel of the plan, bits, streams, graphs, autocast, memory.

Skipped without a GPU or a CUDA build. ``FUSEDNORM_DRY_RUN=1`` runs the bodies on the CPU instead, at fewer
widths, which tests the tests. The general tests run on a GPU by ``FUSEDNORM_TEST_DEVICE=cuda``: conftest.py.
"""

import itertools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
from conftest import NormUnderTest
from reference import DTYPES, HALVES, ulps
from test_values import FORWARD_ULPS, check_gradients

DRY_RUN = os.environ.get("FUSEDNORM_DRY_RUN") == "1"
DEVICE = "cpu" if DRY_RUN else "cuda"
if not DRY_RUN and not torch.cuda.is_available():
    pytest.skip("no GPU: nothing here was run", allow_module_level=True)
if not DRY_RUN and fusednorm.build_info()["cuda"] is None:
    pytest.skip("fusednorm was built without CUDA: nothing here was run", allow_module_level=True)
needs_cuda = pytest.mark.skipif(DRY_RUN, reason="dry run: this needs CUDA itself")

# Around vectors (4 and 8 elements), a warp's 32 lanes, and every power of two: where launch_config.h changes
# from part of a warp to a warp, a block, a cluster, shared memory. The longest are read anew for each pass.
COLS = sorted({3, 5, 7, 9, 12_289, 20_000, 100_003} | {2**k + d for k in range(1, 20) for d in (-1, 0, 1)})
COLS += [1_000_003, 2_000_003]
# One for each place where a row may live, in 16 and 32 bits; none is a whole number of vectors.
TIERS = [5, 33, 257, 1023, 2049, 4101, 8193, 16_391, 32_769, 65_537, 131_075, 262_145, 524_291, 2_000_003]
if DRY_RUN:  # the bodies are what it tests; the CPU's own widths are in test_values.py
    COLS, TIERS = COLS[:-2:6], TIERS[:7:3]


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device, since some limits below fit these and not any; made there if many."""
    where = "cpu" if math.prod(shape) < 2**23 else DEVICE
    return torch.randn(*shape, dtype=torch.float64, device=where).to(DEVICE, dtype)


def _problem(
    rows: int, cols: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, g = 0.5 + _randn(rows, cols), _randn(rows, cols)
    weight, bias = 1 + 0.25 * _randn(cols), _randn(cols)
    parameter_dtype = weight_dtype or dtype
    return x.to(dtype), weight.to(parameter_dtype), bias.to(parameter_dtype), g.to(dtype)


def _all(
    norm: NormUnderTest, x: Tensor, w: Tensor, b: Tensor, g: Tensor, **kw: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and the gradients of input, weight and (with one) bias."""
    inputs = [t.detach().requires_grad_() for t in ((x, w, b) if norm.has_bias else (x, w))]
    y = norm(*inputs, *[None] * (3 - len(inputs)), **kw)
    return y.detach(), torch.autograd.grad(y, inputs, g)


def _same(a: tuple[Tensor, tuple[Tensor, ...]], b: tuple[Tensor, tuple[Tensor, ...]]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(s, t) for s, t in zip(a[1], b[1], strict=True))


def _shifted(t: Tensor, elements: int) -> Tensor:
    """The values of ``t``, so many elements behind an aligned address."""
    room = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)
    return room[elements:].view(t.shape).copy_(t)


# ---- Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLS)
def test_forward_and_backward(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """The limits of test_values.py: 4 ulps for fp32's statistics, 8 for fp64, 1 for 16 bits' one rounding."""
    x, w, b, g = _problem(3, cols, dtype)
    assert ulps(norm(x, w, b), norm.reference(x, w, b)) <= FORWARD_ULPS[dtype]
    assert ulps(norm(x, None, None), norm.reference(x, None, None)) <= FORWARD_ULPS[dtype]
    if cols > 1:  # the gradient of a single column is a difference of equal terms: test_values.py has it
        check_gradients(norm, x, w, b, g)


@pytest.mark.parametrize("cols", [1, 8, 40] if DRY_RUN else [1, 8, 40, 1025, 8193, 65_537])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "b_dtype"),
    [pytest.param(*p, id="-".join(str(d)[6:] for d in p)) for p in itertools.permutations(DTYPES, 3)],
)
def test_mixed_dtypes(
    norm: NormUnderTest, x_dtype: torch.dtype, w_dtype: torch.dtype, b_dtype: torch.dtype, cols: int
) -> None:
    """Field report B65: x, weight and bias of three different dtypes."""
    x, w, b, g = _problem(4, cols, x_dtype, w_dtype)
    b = b.to(b_dtype)
    y = norm(x, w, b)
    assert y.dtype == x_dtype and ulps(y, norm.reference(x, w, b)) <= FORWARD_ULPS[x_dtype]
    if x_dtype != torch.float64:
        # The kernels round fp64 parameters to fp32 first, half an ulp each: compare with those.
        w, b = (t.float() if t.dtype == torch.float64 else t for t in (w, b))
    if cols > 1:
        check_gradients(norm, x, w, b, g)


@pytest.mark.parametrize(
    ("rows", "cols"), [(65_535, 9), (65_537, 9), (70_001, 33), (100_000, 32), (1, 262_144)]
)
def test_many_rows_and_one(norm: NormUnderTest, rows: int, cols: int) -> None:
    """Rows beyond a grid's 65,535; a very tall shape; a single row."""
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, g = _problem(rows, cols, dtype)
        # The limits are those of a handful of rows. Of 70,000 some have weights and a bias that make the
        # row's largest output small, and the error stays: at most 5.8 ulps on the CPU.
        assert ulps(norm(x, w, b), norm.reference(x, w, b)) <= 2 * FORWARD_ULPS[dtype]
        check_gradients(norm, x, w, b, g)


@pytest.mark.parametrize("dims", [2, 3])
def test_several_normalized_dimensions(norm: NormUnderTest, dims: int) -> None:
    x, w, b, g = (
        _randn(*s) for s in [(5, 3, 4, 9), (3, 4, 9)[3 - dims :], (3, 4, 9)[3 - dims :], (5, 3, 4, 9)]
    )
    y, grads = _all(norm, x, w, b, g, dims=dims)
    assert ulps(y, norm.reference(x, w, b, dims=dims), dims) <= FORWARD_ULPS[x.dtype]
    flat = [t.reshape(*t.shape[: t.dim() - dims], -1) for t in (x, w, b, g)]
    _, expected = _all(norm, *flat)
    assert all(torch.equal(a.flatten(), e.flatten()) for a, e in zip(grads, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 262_145)])
def test_zero_rows(norm: NormUnderTest, shape: tuple[int, ...]) -> None:
    """Field report B40: no launch of an empty grid; gradients of the parameters are zeros, not garbage."""
    x, w, b, g = _randn(*shape), _randn(shape[-1]), _randn(shape[-1]), _randn(*shape)
    y, (dx, *others) = _all(norm, x, w, b, g)
    assert y.shape == dx.shape == shape
    assert all(t.shape == (shape[-1],) and (t == 0).all() for t in others)


def test_zero_columns(norm: NormUnderTest) -> None:
    x, empty = _randn(3, 0), _randn(0)
    y, grads = _all(norm, x, empty, empty, x)
    assert y.shape == grads[0].shape == (3, 0)


@pytest.mark.parametrize("cols", TIERS)
@pytest.mark.parametrize("scale", [1e30, 1e19, 1e-20, 1e-30])
def test_extreme_rows(norm: NormUnderTest, cols: int, scale: float) -> None:
    """Field report B83: squares leave fp32's range; such rows are redone scaled, others keep their bits."""
    x, w, b, g = _problem(4, cols, torch.float32)
    ordinary = x[2].clone()
    x = x * scale
    x[2] = ordinary
    y = norm(x, w, b, eps=0.0)
    assert ulps(y, norm.reference(x, w, b, eps=0.0)) <= FORWARD_ULPS[x.dtype]
    assert torch.equal(y[2:3], norm(x[2:3], w, b, eps=0.0))
    check_gradients(norm, x, w, b, g, eps=0.0)


@pytest.mark.parametrize("cols", TIERS)
def test_large_offsets_and_constant_rows(norm: NormUnderTest, cols: int) -> None:
    """Field reports B11, B55: a mean of 1e5 deviations costs no digits; constant rows give the bias."""
    x, w, b, g = _problem(3, cols, torch.float32)
    x = x + 1e5
    assert ulps(norm(x, w, b), norm.reference(x, w, b)) <= FORWARD_ULPS[x.dtype]
    check_gradients(norm, x, w, b, g)
    if norm.has_bias:
        for dtype, value in itertools.product(DTYPES, (-7.3, 5e4)):
            constant = torch.full((2, cols), value, dtype=dtype, device=DEVICE)
            assert torch.equal(norm(constant, w.to(dtype), b.to(dtype)), b.to(dtype).expand(2, cols))


@pytest.mark.parametrize("cols", TIERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_stays_in_its_row(norm: NormUnderTest, cols: int, bad: float) -> None:
    x, w, b, g = _problem(5, cols, torch.bfloat16)
    clean = norm(x, w, b)
    x[1, cols // 2] = bad
    y, (dx, *_) = _all(norm, x, w, b, g)
    others = [0, 2, 3, 4]
    assert torch.equal(y[others], clean[others]) and ulps(y, norm.reference(x, w, b)) <= 1
    assert dx[others].isfinite().all() and dx[1].isnan().any()


@pytest.mark.parametrize("cols", [33, 1024, 4097, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_torch(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """fp32: torch's running variance is off by tens of ulps (1e-6) here, a wrong formula by far over 1e-4.

    bf16: each side rounds once, at most 2 ulps of 2**-7 apart. torch gets its values widened for gradients:
    its own sums over rows in bf16 are what ours shall not agree with (README).
    """
    bound = 1e-4 if dtype == torch.float32 else 2**-6
    x, w, b, g = _problem(64, cols, dtype)
    y, grads = _all(norm, x, w, b, g)
    parameters = (w, b) if norm.has_bias else (w,)
    torch.testing.assert_close(
        y, norm.torch_function(x, (cols,), *parameters, norm.eps), rtol=bound, atol=bound
    )
    wide = [t.float().requires_grad_() for t in (x, *parameters)]
    expected = torch.autograd.grad(
        norm.torch_function(wide[0], (cols,), *wide[1:], norm.eps), wide, g.float()
    )
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.float(), want, rtol=bound, atol=bound)


# ---- Bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", TIERS)
def test_row_bits_do_not_depend_on_the_batch(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """Field report B51: guarantee 2, by row count and by position."""
    rows = 300 if cols < 5000 else 20
    x, w, b, g = _problem(rows, cols, dtype)
    y, (dx, *_) = _all(norm, x, w, b, g)
    for count in (1, 2, 3, 5, 8, 17, 131, 257):
        part = slice(0, min(count, rows))
        some, (some_dx, *_) = _all(norm, x[part], w, b, g[part])
        assert torch.equal(some, y[part]) and torch.equal(some_dx, dx[part]), count
    for i in (1, 7, rows - 1):
        one, (one_dx, *_) = _all(norm, x[i : i + 1], w, b, g[i : i + 1])
        assert torch.equal(one, y[i : i + 1]) and torch.equal(one_dx, dx[i : i + 1]), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 1024, *TIERS])
def test_bits_do_not_depend_on_alignment(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """Each argument in turn, and all together, on every element of a 16-byte vector."""
    problem = _problem(5, cols, dtype)
    expected = _all(norm, *problem)
    for shift in range(1, 16 // dtype.itemsize + 1):
        assert _same(_all(norm, *[_shifted(t, shift) for t in problem]), expected), shift
    for moved in range(4):
        mixed = [_shifted(t, 1) if i == moved else t for i, t in enumerate(problem)]
        assert _same(_all(norm, *mixed), expected), moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [8, 1024, *TIERS])
def test_bits_do_not_depend_on_strides(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """Field reports B02, B09: rows apart by odd and even gaps, swapped dimensions, a strided last one."""
    shape = (2, 3, cols)
    x, w, b, g = (t.view(shape) if t.dim() == 2 else t for t in _problem(6, cols, dtype))
    expected = _all(norm, x, w, b, g)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "odd gap": lambda t: torch.zeros(2, 3, cols + 3, dtype=dtype, device=DEVICE)[..., 1:-2].copy_(t),
        "even gap": lambda t: torch.zeros(2, 3, cols + 8, dtype=dtype, device=DEVICE)[..., :cols].copy_(t),
        "swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "last strided": lambda t: torch.zeros(2, 3, cols * 2, dtype=dtype, device=DEVICE)[..., ::2].copy_(t),
    }
    for name, view in views.items():
        assert _same(_all(norm, view(x), w, b, g), expected), name
        assert _same(_all(norm, x, w, b, view(g)), expected), name
    repeated = x[:1, :1].expand(shape)  # zero strides, as sum().backward() makes them
    assert _same(
        _all(norm, repeated, w, b, repeated),
        _all(norm, *(t.contiguous() for t in (repeated, w, b, repeated))),
    )


@pytest.mark.parametrize(
    "shape", [(4097, 64), (100_000, 32), (1000, 513), (33, 5000), (64, 8193), (5, 100_003), (3, 262_145)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameter_gradients_repeat_bit_for_bit(
    norm: NormUnderTest, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Field report B64: no atomics, so no order that differs from run to run."""
    problem = _problem(*shape, dtype)
    first = _all(norm, *problem)
    assert all(_same(_all(norm, *problem), first) for _ in range(2 if DRY_RUN else 10))


@pytest.mark.parametrize("cols", [33, 100, 255, 513, 1000, 2049])
def test_repeats_find_no_missing_barrier(norm: NormUnderTest, cols: int) -> None:
    """Field report B29: a reduction buffer used twice without a barrier is wrong only now and then."""
    problem = _problem(64 if DRY_RUN else 4096, cols, torch.float32)
    first = _all(norm, *problem)
    assert all(_same(_all(norm, *problem), first) for _ in range(2 if DRY_RUN else 100))


# ---- Operators, compile, autocast ------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(norm: NormUnderTest, requires_grad: bool, dtype: torch.dtype) -> None:
    """The six operators: schema, registrations, fake tensors, AOT dispatch."""
    opcheck = torch.library.opcheck
    x, *parameters = (_randn(*s, dtype=dtype).requires_grad_(requires_grad) for s in [(3, 2, 5), (5,), (5,)])
    parameters = parameters[: 2 if norm.has_bias else 1]
    opcheck(norm.op(), (x, [5], *parameters, 0.1))
    opcheck(norm.op("_forward"), (x, [5], *parameters, 0.1))
    if dtype == torch.bfloat16:
        opcheck(norm.op("_forward"), (x, [5], *parameters, 0.1), {"out_dtype": torch.float32})
    with torch.no_grad():
        statistics = norm.op("_forward")(x, [5], *parameters, 0.1)[1:]
    g = _randn(3, 2, 5, dtype=dtype).requires_grad_(requires_grad)
    for mask in itertools.product([False, True], repeat=3):
        # Double backward in bf16 repeats roundings in another order: opcheck compares too closely there.
        if any(mask) and not (requires_grad and dtype == torch.bfloat16):
            opcheck(norm.op("_backward"), (g, x, [5], *statistics, *parameters, 0.1, list(mask)))


class _Model(torch.nn.Module):
    def __init__(self, norm: NormUnderTest, cols: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, cols, device=DEVICE)
        self.norm = norm.module(cols, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()

    def loss_and_grads(self, call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
        loss = call(x).square().sum()
        return (loss, *torch.autograd.grad(loss, list(self.parameters())))


@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_compile_without_breaks(norm: NormUnderTest, how: dict[str, str]) -> None:
    """Field reports B53, B58: one graph, forward and backward; reduce-overhead puts it into CUDA graphs."""
    torch.compiler.reset()
    model = _Model(norm, 32)
    compiled = torch.compile(model, fullgraph=True, **how)
    for _ in range(3):  # CUDA graphs: warm-up, recording, replay
        x = _randn(4, 8)
        expected = model.loss_and_grads(model, x)
        got = [t.clone() for t in model.loss_and_grads(compiled, x)]  # a replay writes over the last one's
        torch.testing.assert_close(got, list(expected))  # Inductor fuses around the norm: fp32's defaults


def test_compiled_calls_have_the_same_bits(norm: NormUnderTest) -> None:
    torch.compiler.reset()
    module, x = norm.module(64, device=DEVICE), _randn(32, 64)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [40, 8193])
def test_autocast(norm: NormUnderTest, dtype: torch.dtype, parameter_dtype: torch.dtype, cols: int) -> None:
    """CUDA autocast as torch 2.15's: an fp32 result (fp64 for fp64), as if the input were widened first.

    The CPU's autocast leaves both norms alone, so a dry run expects the input's dtype.
    """
    x, w, b, _ = _problem(6, cols, dtype, parameter_dtype)
    result_dtype = torch.float32 if dtype in HALVES and not DRY_RUN else dtype
    inputs = [t.requires_grad_() for t in ((x, w, b) if norm.has_bias else (x, w))]
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast(DEVICE, torch.bfloat16):
        y = norm(*inputs, *[None] * (3 - len(inputs)))
    assert y.dtype == result_dtype
    assert [t.data_ptr() for t in saved].count(x.data_ptr()) == 1
    assert all(t.numel() < x.numel() for t in saved if t.data_ptr() != x.data_ptr())  # no wide copy of it
    g = _randn(6, cols, dtype=result_dtype)
    grads = torch.autograd.grad(y, inputs, g)  # outside of the region, as training loops do
    assert [t.dtype for t in grads] == [t.dtype for t in inputs]
    assert ulps(y, norm.reference(x, w, b)) <= FORWARD_ULPS[result_dtype]
    _, expected = _all(norm, x.to(result_dtype), w, b, g)
    for grad, want in zip(grads, expected, strict=True):
        # fp32's rounding in sums of either order, then perhaps another 16-bit neighbour.
        bound = max(1e-5, torch.finfo(grad.dtype).eps)
        torch.testing.assert_close(grad, want.to(grad.dtype), rtol=bound, atol=1e-5)


@needs_cuda
def test_autocast_gives_torchs_dtypes(norm: NormUnderTest) -> None:
    """In a model: Linear (bf16) -> norm (fp32) -> Linear, gradients of fp32 parameters in fp32 (B60)."""
    first, last = (torch.nn.Linear(16, 16, device=DEVICE) for _ in range(2))
    for make in (norm.module, norm.torch_module):
        module = make(16, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            hidden = module(first(_randn(4, 16)))
            out = last(hidden)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and module.weight.grad.dtype == torch.float32
        # torch before 2.15 does not list rms_norm for autocast: ours gives fp32 on any torch.
        if make is norm.module or norm.has_bias:
            assert hidden.dtype == torch.float32


# ---- Streams, graphs, memory -----------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("backward_inside", [False, True])
def test_side_stream(norm: NormUnderTest, backward_inside: bool) -> None:
    """Field report B26: the input is written late on a side stream: a kernel elsewhere is too early."""
    x, w, b, g = _problem(512, 1000, torch.float32)
    expected = _all(norm, x, w, b, g)
    inputs = [torch.zeros_like(t).requires_grad_() for t in ((x, w, b) if norm.has_bias else (x, w))]
    late_g, stream = torch.zeros_like(g), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(100_000_000)  # cycles: about 50 ms, a thousand times what the norm takes
        for late, now in zip([*inputs, late_g], [*(x, w, b)[: len(inputs)], g], strict=True):
            late.copy_(now)
        with torch.enable_grad():
            y = norm(*inputs, *[None] * (3 - len(inputs)))
    # Autograd runs a backward on the stream of its forward, wherever it is called from.
    with torch.cuda.stream(stream) if backward_inside else nullcontext():
        if not backward_inside:
            torch.cuda.current_stream().wait_stream(stream)  # for late_g
        grads = torch.autograd.grad(y, inputs, late_g)
    torch.cuda.synchronize()
    assert _same((y.detach(), grads), expected)


def _captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """Replays ``function`` from a CUDA graph; its results are the same tensors each time."""
    if DRY_RUN:
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initialisation must be over before a capture
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


@pytest.mark.parametrize("cols", TIERS)
def test_graph_capture(norm: NormUnderTest, cols: int) -> None:
    """Field report B58: every kernel in a CUDA graph, replayed on changed inputs, gives eager's bits."""
    problem = _problem(7, cols, torch.bfloat16, torch.float32)
    parameters = problem[1:3] if norm.has_bias else (problem[1], None)
    forward = _captured(lambda: norm(problem[0], *parameters))
    both = _captured(lambda: _all(norm, *problem))
    for _ in range(2):
        for static, new in zip(problem, _problem(7, cols, torch.bfloat16, torch.float32), strict=True):
            static.copy_(new)
        y, result = forward(), both()
        expected = _all(norm, *problem)
        assert torch.equal(y, expected[0]) and _same(result, expected)


@needs_cuda
def test_calls_do_not_wait(norm: NormUnderTest) -> None:
    """The host returns while the device is still busy with what came before."""
    for cols in TIERS:
        problem = _problem(7, cols, torch.float32)
        _all(norm, *problem)  # loads kernels, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms, hundreds of times what the calls take
        done = torch.cuda.Event()
        try:
            torch.cuda.set_sync_debug_mode("error")
            _all(norm, *problem)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        done.record()
        assert not done.query(), cols
        torch.cuda.synchronize()


def _allocations(function: Callable[[], Any]) -> tuple[int, int, Any]:
    """How many allocations a call makes, their bytes, and its results."""
    function()  # what is made once for the process does not count
    before = torch.cuda.memory_stats()
    results = function()
    after = torch.cuda.memory_stats()
    count, size = ("allocation.all.allocated", "requested_bytes.all.allocated")
    return after[count] - before[count], after[size] - before[size], results


@needs_cuda
@pytest.mark.parametrize("shape", [(7, 40), (100_000, 32), (8192, 4096), (1024, 32_769), (64, 262_145)])
def test_only_outputs_and_one_workspace_are_allocated(norm: NormUnderTest, shape: tuple[int, int]) -> None:
    x, w, b, g = _problem(*shape, torch.bfloat16)
    parameters = (w, b) if norm.has_bias else (w,)
    tail = (*parameters, norm.eps)
    with torch.no_grad():
        count, _, _ = _allocations(lambda: norm(x, w, b))
        assert count <= 2
        count, size, outputs = _allocations(lambda: norm.op("_forward")(x, [shape[1]], *tail))
        assert count <= len(outputs) + 1
        statistics = outputs[1:]
        mask = [True, True, norm.has_bias]
        arguments = (g, x, [shape[1]], *statistics, *tail, mask)
        count, size, grads = _allocations(lambda: norm.op("_backward")(*arguments))
    grads = [t for t in grads if t is not None]
    assert count <= len(grads) + 1
    workspace = size - sum(t.nbytes for t in grads)
    # Partials are written and read once: 2.5 % of the least traffic (three matrices) each way, about 5 % in
    # all. Of few rows a few rows of partials, whatever their share, and some bytes to exchange sums in.
    assert workspace <= max(0.025 * 3 * x.nbytes, 8 * shape[1] * 4 * len(parameters)) + 65_536


@needs_cuda
def test_autocast_makes_no_wide_copy(norm: NormUnderTest) -> None:
    x, w, b, _ = _problem(512, 4096, torch.bfloat16, torch.float32)
    x.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        _, size, y = _allocations(lambda: norm(x, w, b))
    # The fp32 output and at most two statistics a row, and not another 4 bytes an element.
    assert y.nbytes <= size <= y.nbytes + 512 * 4 * 2 + 65_536


# ---- Devices and sizes -----------------------------------------------------------------------------------


def test_tensors_on_two_devices(norm: NormUnderTest) -> None:
    """Field report B38: refused by name, and the process works on."""
    other = "meta" if DRY_RUN else "cpu"
    x, w = _randn(2, 4), torch.ones(4, device=DEVICE)
    for a, b in ((x, w.to(other)), (x.to(other), w)):
        message = rf"weight: expected on the input's device {a.device}, got {b.device}"
        with pytest.raises(RuntimeError, match=rf"fusednorm::{norm.name}: {message}"):
            norm(a, b, None)
    if norm.has_bias:
        with pytest.raises(RuntimeError, match="bias: expected on the input's device"):
            norm(x, w, w.to(other))
    assert norm(x, w, None).isfinite().all()


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: the second device was not tried")
def test_second_device(norm: NormUnderTest) -> None:
    """Field report B30: the tensors' device, not the current one, which stays as it was."""
    problem = _problem(9, 1000, torch.bfloat16)
    expected = _all(norm, *problem)
    torch.cuda.set_device(0)
    y, grads = _all(norm, *[t.to("cuda:1") for t in problem])
    assert torch.cuda.current_device() == 0
    assert {t.device for t in (y, *grads)} == {torch.device("cuda:1")}
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert _same((y.to("cuda:0"), tuple(t.to("cuda:0") for t in grads)), expected)
    with pytest.raises(RuntimeError, match="expected on the input's device cuda:1, got cuda:0"):
        norm(problem[0].to("cuda:1"), problem[1], None)


def _skip_without_memory(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30 if not DRY_RUN else gib
    if free < gib:
        pytest.skip(f"needs {gib:g} GiB of device memory, {free:.1f} are free: not run")


def test_more_than_2_to_the_31_elements(norm: NormUnderTest) -> None:
    """Field report B32: the same row throughout, so every row must come out as the first."""
    _skip_without_memory(24)  # x, g, y, dx of 4 GiB each, and comparisons
    rows, cols = (19 if DRY_RUN else 2**20 + 1), 2048
    row, w, b, g_row = _problem(1, cols, torch.bfloat16, torch.float32)
    x, g = (t.expand(rows, cols).contiguous() for t in (row, g_row))
    y, (dx, *others) = _all(norm, x, w, b, g)
    one_y, (one_dx, *one) = _all(norm, row, w, b, g_row)
    assert torch.equal(y[-1:], one_y) and (y == one_y).all()
    del y
    assert torch.equal(dx[-1:], one_dx) and (dx == one_dx).all()
    for total, each in zip(others, one, strict=True):
        # Equal terms round in the same direction: 8000 or so in one fp32 register are off by up to
        # 8000 * 2**-25 = 2.4e-4, and the blocks' sums add little to that.
        torch.testing.assert_close(total, each * rows, rtol=1e-3, atol=0)


def test_offsets_beyond_2_to_the_31(norm: NormUnderTest) -> None:
    """Rows a billion elements apart, in memory of which little is read."""
    _skip_without_memory(6)
    stride = 5000 if DRY_RUN else 2**30 + 1
    x, w, b, g = _problem(3, 2049, torch.bfloat16)
    room = torch.empty(2 * stride + 2049, dtype=x.dtype, device=DEVICE)
    far = room.as_strided((3, 2049), (stride, 1)).copy_(x)
    assert _same(_all(norm, far, w, b, g), _all(norm, x, w, b, g))
