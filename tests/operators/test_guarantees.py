"""The guarantees of the interface: inputs untouched, the same bits everywhere, nothing superfluous kept.

Run for every instruction set the machine has.
"""

import itertools

import pytest
import torch
from torch import Tensor

from conftest import NORMS, NormUnderTest, of_the_cpu
from reference import DTYPES


def _problem(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cols = shape[-1]
    return tuple(torch.randn(s, dtype=torch.float64).to(dtype) for s in (shape, (cols,), (cols,), shape))  # type: ignore[return-value]


def _grads(norm: NormUnderTest, x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in ((x, w, b) if norm.has_bias else (x, w))]
    y = norm(*inputs, *[None] * (3 - len(inputs)))
    return torch.autograd.grad(y, inputs, g)


# ---- 1: nothing given is written to ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliced", [False, True])
def test_inputs_stay_as_they_are(norm: NormUnderTest, dtype: torch.dtype, sliced: bool) -> None:
    """Field reports B04, B12."""
    whole = [*_problem((6, 40), dtype)]
    x, w, b, g = (t[..., 4:25] if sliced else t for t in whole)
    before = [t.clone() for t in whole]
    y = norm(x, w, b)
    grads = _grads(norm, x, w, b, g)
    for t, old in zip(whole, before, strict=True):
        assert torch.equal(t, old)
    pointers = {t.untyped_storage().data_ptr() for t in whole}
    assert all(t.untyped_storage().data_ptr() not in pointers for t in (y, *grads))


# ---- 2: a row has the same bits wherever it stands ---------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [3, 33, 512, 1025])
def test_row_bits_do_not_depend_on_the_batch(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """Field report B51."""
    x, w, b, g = _problem((300, cols), dtype)
    whole, dx = norm(x, w, b), _grads(norm, x, w, b, g)[0]
    for i in (0, 17, 299):
        assert torch.equal(whole[i : i + 1], norm(x[i : i + 1], w, b))
        assert torch.equal(dx[i : i + 1], _grads(norm, x[i : i + 1], w, b, g[i : i + 1])[0])
    for rows in (1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257):
        assert torch.equal(whole[:rows], norm(x[:rows], w, b))
        assert torch.equal(dx[:rows], _grads(norm, x[:rows], w, b, g[:rows])[0])


# More than the caches are taken to hold, where rows are asked for early and gradients streamed past the
# caches: whole vectors, not whole vectors, parameters that crowd the first cache, rows too long to ask for
# early; and in 16 bits the sizes from which on the forward and the backward do so.
BEYOND_CACHES = [
    (torch.float32, 1502, 1024),
    (torch.float32, 1501, 1023),
    (torch.float32, 386, 4096),
    (torch.float32, 82, 17000),
    (torch.float64, 802, 1024),
    (torch.bfloat16, 5302, 1024),
    (torch.bfloat16, 4099, 4096),
    (torch.float16, 4099, 4096),
]


@of_the_cpu
@pytest.mark.parametrize(("dtype", "rows", "cols"), BEYOND_CACHES)
def test_row_bits_do_not_depend_on_the_caches(
    norm: NormUnderTest, dtype: torch.dtype, rows: int, cols: int
) -> None:
    x, w, b, g = (
        t.to(dtype) for t in (torch.randn(s) for s in ((rows, cols), (cols,), (cols,), (rows, cols)))
    )
    whole, dx = norm(x, w, b), _grads(norm, x, w, b, g)[0]
    (alone,) = torch.autograd.grad(norm(leaf := x.detach().requires_grad_(), w, b), leaf, g)
    assert torch.equal(dx, alone)  # without parameters' gradients
    for begin in (0, rows // 2 - 1, rows - 9):
        part = slice(begin, begin + 9)
        assert torch.equal(whole[part], norm(x[part], w, b))
        assert torch.equal(dx[part], _grads(norm, x[part], w, b, g[part])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_alignment(norm: NormUnderTest, dtype: torch.dtype) -> None:
    x, w, b, g = _problem((20, 77), dtype)
    whole, dx = norm(x, w, b), _grads(norm, x, w, b, g)[0]
    for shift in range(1, 9):
        moved = torch.empty(20 * 77 + shift, dtype=dtype)[shift:].view(20, 77).copy_(x)
        assert torch.equal(norm(moved, w, b), whole)
        assert torch.equal(_grads(norm, moved, w, b, g)[0], dx)


def _strided_views(t: Tensor) -> dict[str, Tensor]:
    """The values of ``t`` (4 leading dimensions) in other memory."""
    shape, cols = t.shape, t.shape[-1]
    row_gap = torch.zeros(*shape[:-1], cols + 5, dtype=t.dtype)[..., 2:-3].copy_(t)
    permuted = t.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4)
    last_strided = torch.zeros(*shape[:-1], cols * 2, dtype=t.dtype)[..., ::2].copy_(t)
    transposed = t.transpose(0, -1).contiguous().transpose(0, -1)
    return {"row gap": row_gap, "permuted": permuted, "last strided": last_strided, "transposed": transposed}


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """Field reports B02, B09: strided inputs and gradients, bit for bit the contiguous ones' result."""
    x, w, b, g = _problem((2, 3, 4, 5, 19), dtype)
    y, grads = norm(x, w, b), _grads(norm, x, w, b, g)
    for name, strided in _strided_views(x).items():
        assert torch.equal(strided, x)
        result = norm(strided, w, b)
        assert torch.equal(result, y) and result.is_contiguous(), name
        assert all(torch.equal(a, e) for a, e in zip(_grads(norm, strided, w, b, g), grads, strict=True)), (
            name
        )
    for name, strided in _strided_views(g).items():
        assert all(torch.equal(a, e) for a, e in zip(_grads(norm, x, w, b, strided), grads, strict=True)), (
            name
        )


@pytest.mark.parametrize("shape", [(1, 6), (4, 1), (1, 1)])
def test_expanded_gradients_and_inputs(norm: NormUnderTest, shape: tuple[int, int]) -> None:
    """Field report B02: zero strides, as ``sum().backward()`` makes them."""
    x, w, b, _ = _problem((4, 6), torch.float32)
    g = torch.randn(shape).expand(4, 6)
    expected = _grads(norm, x, w, b, g.contiguous())
    assert all(torch.equal(a, e) for a, e in zip(_grads(norm, x, w, b, g), expected, strict=True))
    expanded = torch.randn(shape).expand(4, 6)
    assert torch.equal(norm(expanded, w, b), norm(expanded.contiguous(), w, b))
    overlapping = torch.randn(20).as_strided((4, 6), (2, 1))
    assert torch.equal(norm(overlapping, w, b), norm(overlapping.contiguous(), w, b))


def test_strided_rows_are_not_copied(norm: NormUnderTest) -> None:
    """Per-head rows of a packed qkv: no copy of the input is made."""
    qkv = torch.randn(2, 16, 3, 4, 32)
    q = qkv[:, :, 0].transpose(1, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm(q, torch.ones(32), None)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::contiguous", "aten::copy_", "aten::clone"}, names


# ---- 3: gradients of the parameters have the same bits at any number of threads ---------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4097, 64), (33, 5000), (1000, 513), (5, 100_003)])
def test_threads_do_not_change_bits(norm: NormUnderTest, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Field report B64, and guarantee 2 for outputs."""
    x, w, b, g = _problem(shape, dtype)
    results = []
    for threads in (1, 2, 3, 8, 1):
        torch.set_num_threads(threads)
        results.append((norm(x, w, b), *_grads(norm, x, w, b, g)))
    for other in results[1:]:
        assert all(torch.equal(a, e) for a, e in zip(other, results[0], strict=True))


def test_threads_do_not_change_bits_beside_an_extreme_row(norm: NormUnderTest) -> None:
    """Few long rows are shared out by columns, unless one of them has to be taken scaled."""
    x, w, b, g = _problem((33, 5000), torch.float32)
    x[7] *= 1e35
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(_grads(norm, x, w, b, g))
    assert all(a.isfinite().all() and torch.equal(a, e) for a, e in zip(*results, strict=True))


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 4096), (torch.float16, 8192)])
@pytest.mark.parametrize("threads", [1, 2])
def test_parameter_gradients_accumulate_in_fp32(dtype: torch.dtype, rows: int, threads: int) -> None:
    """Field report B07: sums in 16 bits stop growing at 256 (bf16) or 2048 (fp16)."""
    torch.set_num_threads(threads)
    for parameter_dtype in (dtype, torch.float32):
        w, b = torch.ones(2, dtype=parameter_dtype), torch.zeros(2, dtype=parameter_dtype)
        g = torch.ones(rows, 2, dtype=dtype)
        _, dw, db = _grads(NORMS[0], torch.tensor([[1.0, 3.0]], dtype=dtype).repeat(rows, 1), w, b, g)
        assert db.tolist() == [rows, rows]
        assert dw.double().tolist() == pytest.approx(
            [-rows, rows], rel=1e-5 if dtype != parameter_dtype else 4e-3
        )
        _, dw = _grads(NORMS[1], torch.ones(rows, 2, dtype=dtype), w, b, g)
        assert dw.double().tolist() == pytest.approx(
            [rows, rows], rel=1e-5 if dtype != parameter_dtype else 4e-3
        )


# ---- 4: only what is asked for -----------------------------------------------------------------------


def test_every_combination_of_requires_grad(norm: NormUnderTest) -> None:
    x, w, b, g = _problem((7, 40), torch.float32)
    everything = (x, w, b) if norm.has_bias else (x, w)
    expected = _grads(norm, x, w, b, g)
    for wanted in itertools.product([False, True], repeat=len(everything)):
        inputs = [t.detach().requires_grad_(r) for t, r in zip(everything, wanted, strict=True)]
        y = norm(*inputs, *[None] * (3 - len(inputs)))
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.backward(g)
        for t, want, e in zip(inputs, wanted, expected, strict=True):
            assert (t.grad is not None) == want
            assert t.grad is None or torch.equal(t.grad, e)


def test_output_mask(norm: NormUnderTest) -> None:
    x, w, b, g = _problem((7, 40), torch.float32)
    parameters = (w, b) if norm.has_bias else (w,)
    _, *statistics = norm.op("_forward")(x, [40], *parameters, norm.eps)
    outputs = 3
    whole = norm.op("_backward")(g, x, [40], *statistics, *parameters, norm.eps, [True] * outputs)
    for mask in itertools.product([False, True], repeat=outputs):
        masked = norm.op("_backward")(g, x, [40], *statistics, *parameters, norm.eps, list(mask))
        for wanted, got, expected in zip(mask, masked, whole, strict=True):
            assert (got is not None) == wanted
            assert got is None or torch.equal(got, expected)


# ---- 5: what is kept for backward --------------------------------------------------------------------


def test_saved_tensors(norm: NormUnderTest) -> None:
    """Field report B89: the input in its own dtype, the weight, and the row statistics; no copies."""
    x, w, b, _ = _problem((64, 128), torch.bfloat16)
    inputs = [t.requires_grad_() for t in ((x, w, b) if norm.has_bias else (x, w))]
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        norm(*inputs, *[None] * (3 - len(inputs)))
    given = {t.data_ptr() for t in inputs}
    kept = [t for t in saved if t.data_ptr() not in given]
    assert [t.dtype for t in kept] == [torch.float32] * (2 if norm.has_bias else 1)
    assert all(t.shape == (64,) for t in kept)
    assert {t.data_ptr() for t in saved} & given == {x.data_ptr(), w.data_ptr()}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_graph_without_grad(norm: NormUnderTest, context) -> None:
    x, w, b, _ = _problem((4, 16), torch.float32)
    expected = norm(x, w, b)
    x.requires_grad_()
    with context():
        y = norm(x, w, b)
    assert y.grad_fn is None and not y.requires_grad
    assert torch.equal(y, expected)
