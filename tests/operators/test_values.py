"""Outputs and gradients against float64 formulas: every dtype, sizes around every limit, extreme rows.

Run for every instruction set the machine has (ctest sets ATEN_CPU_CAPABILITY).
"""

import math

import pytest
import torch
from torch import Tensor

import reference
from conftest import NORMS, SIMT_FULL, SIMT_LIBRARY, NormUnderTest, of_the_cpu
from reference import DTYPES, HALVES, ulps

# Around vectors (2 to 16 lanes), the unrolled step, the sum block (up to 1024), and far from a power of 2.
COLS = [
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    63,
    65,
    127,
    129,
    255,
    257,
    1023,
    1024,
    1025,
    4097,
    8191,
    8193,
]
# fp32: the statistics' own error. fp64: twice that, since the reference is rounded as often (the C++ tests
# hold fp64 to 4 against long double). 16 bits: one rounding, at the store.
FORWARD_ULPS = {torch.float64: 8.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}


def _problem(
    rows: int, cols: int, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parameter_dtype = parameter_dtype or dtype
    x = (offset + torch.randn(rows, cols, dtype=torch.float64)).to(dtype)
    weight = (1 + 0.25 * torch.randn(cols, dtype=torch.float64)).to(parameter_dtype)
    bias = torch.randn(cols, dtype=torch.float64).to(parameter_dtype)
    grad_output = torch.randn(rows, cols, dtype=torch.float64).to(dtype)
    return x, weight, bias, grad_output


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def check_gradients(norm: NormUnderTest, x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, **kw) -> None:
    """Gradients within a few ulps of the largest of the terms they are summed from (reference.bound)."""
    count = 3 if norm.has_bias else 2
    inputs = _leaves(x, weight, bias)[:count]
    grads = torch.autograd.grad(norm(*inputs, *[None] * (3 - count), **kw), inputs, g)
    options = {k: v for k, v in kw.items() if k != "weight_offset"}
    gain = weight.double() + kw.get("weight_offset", 0.0)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32

    def check(grad: Tensor, want: Tensor, terms: Tensor, of: Tensor) -> None:
        assert grad.dtype == of.dtype
        # Measured: at most 4.1; 8 leaves room for other machines' order of sums.
        allowed = reference.bound(want, terms, grad.dtype, acc, 8)
        error = (grad.double() - want).abs()
        worst = (error - allowed).argmax()
        assert (error <= allowed).all(), (of.shape, error.flatten()[worst], allowed.flatten()[worst])

    sums = [torch.zeros_like(gain) for _ in range(4)]  # of weight and bias: what is expected, and the terms
    for part in reference.blocks(x):
        wide = _leaves(x[part].double(), weight.double(), bias.double())[:count]
        grad_output = g[part].double()
        output = norm.reference(*wide, *[None] * (3 - count), **kw)
        want, *of_parameters = torch.autograd.grad(output, wide, grad_output)
        with torch.no_grad():
            rows = x[part].double()
            x_hat = norm.reference(rows, None, None, **options)
            d = rows - rows.mean(-1, keepdim=True) if norm.has_bias else rows
            rstd = x_hat.norm(dim=-1, keepdim=True) / d.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            terms = rstd * (grad_output * gain).abs().amax(-1, keepdim=True)
            check(grads[0][part], want, terms.expand_as(want), x)
            for total, value in zip(sums, of_parameters, strict=False):
                total += value
            # x_hat is right to ulps of its row's largest value, which is at least 1.
            sums[2] += (grad_output * x_hat.abs().clamp_min(1)).abs().sum(0)
            sums[3] += grad_output.abs().sum(0)
    for i, of in enumerate((weight, bias)[: count - 1]):
        check(grads[i + 1], sums[i], sums[i + 2], of)


@of_the_cpu
@pytest.mark.parametrize(
    ("dtype", "rows", "cols"),
    [(torch.float32, 1503, 1024), (torch.float32, 1501, 1023), (torch.bfloat16, 4099, 4096)],
)
def test_beyond_the_caches(norm: NormUnderTest, dtype: torch.dtype, rows: int, cols: int) -> None:
    """Where gradients are streamed past the caches, and where they do not lie on whole vectors."""
    x, weight, bias, g = _problem(rows, cols, dtype, offset=0.5)
    check_gradients(norm, x, weight, bias, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", COLS)
def test_forward_and_backward(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    x, weight, bias, g = _problem(5, cols, dtype, offset=0.5)
    y = norm(x, weight, bias)
    assert y.dtype == dtype and y.is_contiguous()
    assert ulps(y, norm.reference(x, weight, bias)) <= FORWARD_ULPS[dtype]
    assert ulps(norm(x, None, None), norm.reference(x, None, None)) <= FORWARD_ULPS[dtype]
    if cols > 1:  # one column: see test_single_element_rows
        check_gradients(norm, x, weight, bias, g)


@pytest.mark.parametrize("cols", [12289, 65535, 65537, 100003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    """Field report B37: no list of widths."""
    x, weight, bias, g = _problem(2, cols, dtype)
    assert ulps(norm(x, weight, bias), norm.reference(x, weight, bias)) <= FORWARD_ULPS[dtype]
    check_gradients(norm, x, weight, bias, g)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 4099])
def test_row_counts(norm: NormUnderTest, rows: int) -> None:
    """Around the row block, the chunk of rows and the number of chunks."""
    x, weight, bias, g = _problem(rows, 33, torch.float32)
    assert ulps(norm(x, weight, bias), norm.reference(x, weight, bias)) <= 4
    check_gradients(norm, x, weight, bias, g)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_mixed_dtypes(
    norm: NormUnderTest, x_dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    """Field reports B15, B65: each argument of its own dtype; the output has the input's."""
    x, weight, bias, g = _problem(6, 40, x_dtype, weight_dtype)
    bias = bias.to(bias_dtype)
    y = norm(x, weight, bias)
    assert y.dtype == x_dtype
    assert ulps(y, norm.reference(x, weight, bias)) <= FORWARD_ULPS[x_dtype]
    if x_dtype == torch.float32 and torch.float64 in (weight_dtype, bias_dtype):
        # The parameters are rounded to fp32 first: half an ulp each, so compare with those.
        weight, bias = (t.float() if t.dtype == torch.float64 else t for t in (weight, bias))
    check_gradients(norm, x, weight, bias, g)


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("cols", [64, 1024, 3000, 2**20])
def test_large_offset(offset: float, cols: int) -> None:
    """Field report B11: a mean up to 1e6 standard deviations away; torch is off by 8e-4 at 1e4."""
    if SIMT_LIBRARY and not SIMT_FULL and cols == 2**20 and offset != 1e6:
        pytest.skip("15 s of the executor each: the largest offset here, all in make test-simt")
    norm = NORMS[0]
    x, weight, bias, g = _problem(3, cols, torch.float32, offset=offset)
    assert ulps(norm(x, weight, bias), norm.reference(x, weight, bias)) <= 4
    check_gradients(norm, x, weight, bias, g)


def test_offset_of_the_first_columns() -> None:
    """The pivot is the mean of the first columns: outliers there must cost no digits."""
    norm = NORMS[0]
    for cols in (48, 4096):
        x, weight, bias, g = _problem(4, cols, torch.float32)
        x[:, :16] += 3e4
        x[1, 16:] *= 1e-3
        assert ulps(norm(x, weight, bias), norm.reference(x, weight, bias)) <= 4
        check_gradients(norm, x, weight, bias, g)


def test_structured_sums(norm: NormUnderTest) -> None:
    """Equal squares round in the same direction: 2**20 of them must not drift."""
    x = torch.full((1, 2**20), 0.1)
    x[:, ::2] = -0.1
    assert ulps(norm(x, None, None), norm.reference(x, None, None)) <= 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [3e5, 0.1, -7.3, 0.0])
@pytest.mark.parametrize("cols", [1, 2, 3, 7, 16, 17, 1000, 1025])
def test_constant_rows_give_exactly_the_bias(dtype: torch.dtype, value: float, cols: int) -> None:
    """Field report B55: a rounded mean would leave a remainder, magnified 300 times."""
    norm = NORMS[0]
    if dtype == torch.float16:
        value = min(value, 5e4)
    x = torch.full((3, cols), value, dtype=dtype)
    weight, bias = torch.full((cols,), 5.0, dtype=dtype), torch.full((cols,), -2.0, dtype=dtype)
    assert torch.equal(norm(x, weight, bias), bias.expand(3, cols))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, 1e38), (torch.float32, -3.4e38), (torch.bfloat16, 3e38), (torch.float64, 1.7e308)],
)
@pytest.mark.parametrize("options", [{}, {"eps_outside": True}, {"eps": 1e-35}, {"eps": 1e-90}])
def test_huge_constant_rows(dtype: torch.dtype, value: float, options: dict) -> None:
    """Even the sum of a few elements overflows; the row is constant all the same."""
    for cols in (1, 3, 16, 33, 2000):
        x, b = _leaves(torch.full((2, cols), value, dtype=dtype), torch.full((cols,), -2.0, dtype=dtype))
        y = NORMS[0](x, None, b, **options)
        assert torch.equal(y, b.expand(2, cols))
        if not options:
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert (dx == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_element_rows(dtype: torch.dtype) -> None:
    """Field report B55, with gradients: y = bias, dx = 0, dW = 0, db = rows."""
    norm = NORMS[0]
    value = 5e4 if dtype == torch.float16 else 3e5
    x, w, b = _leaves(
        torch.tensor([[value]], dtype=dtype),
        torch.tensor([5.0], dtype=dtype),
        torch.tensor([-2.0], dtype=dtype),
    )
    y = norm(x, w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    assert (y.item(), dx.item(), dw.item(), db.item()) == (-2.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("scale", [1e30, 1e25, 1e19, 1e-18, 1e-20, 1e-30, 1e-38])
def test_extreme_rows(norm: NormUnderTest, scale: float) -> None:
    """Field report B83: squares over- or underflow fp32; the row is redone scaled. eps 0, so no shelter."""
    for cols in (4, 100, 3000):
        x, weight, bias, g = _problem(6, cols, torch.float32)
        x = x * scale
        x[3] = torch.randn(cols)  # an ordinary row amid them keeps its bits
        y = norm(x, weight, bias, eps=0.0)
        assert ulps(y, norm.reference(x, weight, bias, eps=0.0)) <= 4
        assert torch.equal(y[3:4], norm(x[3:4], weight, bias, eps=0.0))
        if 1e-30 <= scale <= 1e30:
            check_gradients(norm, x, weight, bias, g, eps=0.0)


def test_extreme_rows_of_other_dtypes(norm: NormUnderTest) -> None:
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5]], dtype=torch.float64)
    cases = [(torch.float64, s) for s in (1e200, 1e-200, 1e-310)] + [
        (torch.bfloat16, s) for s in (1e30, 1e-30)
    ]
    for dtype, scale in cases:
        # Powers of two scale exactly, and with eps 0 the output does not depend on the scale.
        factor = 2.0 ** round(math.log2(scale))
        scaled = (x * factor).to(dtype)
        assert torch.equal(norm(scaled, None, None, eps=0.0), norm(x.to(dtype), None, None, eps=0.0)), dtype


def test_overflowing_sum_of_ordinary_squares(norm: NormUnderTest) -> None:
    """The squares fit fp32, their sum does not."""
    x = torch.randn(2, 2**20) * 1e17
    assert ulps(norm(x, None, None), norm.reference(x, None, None)) <= 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_stays_in_its_row(norm: NormUnderTest, dtype: torch.dtype, bad: float) -> None:
    x, weight, bias, g = _problem(6, 37, dtype)
    clean = norm(x, weight, bias)
    x[2, 5] = bad
    y = norm(x, weight, bias)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others])
    assert ulps(y, norm.reference(x, weight, bias)) <= FORWARD_ULPS[dtype]
    xr = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(norm(xr, weight, bias), xr, g)
    assert dx[others].isfinite().all() and dx[2].isnan().any()


def test_fp16_squares_do_not_overflow() -> None:
    """Field report B14."""
    x = torch.tensor([[800.0, -800, 400, 0], [6e4, 6e4, -6e4, 6e4]], dtype=torch.float16)
    rms = NORMS[1](x, None, None)
    assert ulps(rms, torch.tensor([[4 / 3, -4 / 3, 2 / 3, 0], [1, 1, -1, 1]])) <= 1
    expected = torch.tensor([[1.183216, -1.521278, 0.507093, -0.169031]])
    assert ulps(NORMS[0](x[:1], None, None), expected) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_with_tiny_eps(dtype: torch.dtype) -> None:
    """Field report B25: eps 1e-12 must not become 0 in fp16."""
    x = torch.zeros(2, 6, dtype=dtype).requires_grad_()
    w, b = _leaves(torch.ones(6, dtype=dtype), torch.zeros(6, dtype=dtype))
    y = NORMS[0](x, w, b, eps=1e-12)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    assert (y == 0).all() and (dx == 0).all() and (dw == 0).all() and (db == 2).all()
    y = NORMS[1](x, w, None, eps=1e-12)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert (y == 0).all() and (dw == 0).all() and not dx.isnan().any()
    expected = math.inf if dtype == torch.float16 else 1e6
    assert torch.allclose(dx.double(), torch.tensor(expected).double(), rtol=4e-3)


def test_eps_none_is_the_accumulation_types_epsilon() -> None:
    """Field report B49: fp32's epsilon for 16-bit inputs, as torch 2.15."""
    for dtype, expected in [
        (torch.float32, 0.577350),
        (torch.bfloat16, 0.578125),
        (torch.float16, 0.57715),
        (torch.float64, 0.99999999814),
    ]:
        x = torch.full((1, 8), 2.0**-12, dtype=dtype)
        for y in (NORMS[1](x, None, None, eps=None), NORMS[1].op()(x, [8])):
            assert ulps(y, reference.rms_norm(x)) <= FORWARD_ULPS[dtype]
            assert y[0, 0].item() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 2.0, -0.1])
def test_eps_is_used_as_given(norm: NormUnderTest, eps: float) -> None:
    """Field report B22; a negative eps follows the formula (NaN where variance + eps is negative)."""
    x, weight, bias, g = _problem(4, 50, torch.float32)
    x[1] *= 0.1
    y = norm(x, weight, bias, eps=eps)
    assert ulps(y, norm.reference(x, weight, bias, eps=eps)) <= 4
    assert y[1].isnan().all() == (eps < -0.02)


# ---- Options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1.0, -0.5])
def test_weight_offset(norm: NormUnderTest, dtype: torch.dtype, offset: float) -> None:
    x, weight, bias, g = _problem(5, 70, dtype)
    y = norm(x, weight, bias, weight_offset=offset)
    assert ulps(y, norm.reference(x, weight, bias, weight_offset=offset)) <= FORWARD_ULPS[dtype]
    check_gradients(norm, x, weight, bias, g, weight_offset=offset)
    assert torch.equal(norm(x, None, None, weight_offset=offset), norm(x, None, None))  # no weight, no offset


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps_outside", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_annotated_layer_norm(dtype: torch.dtype, eps_outside: bool, unbiased: bool) -> None:
    options = {"eps_outside": eps_outside, "unbiased": unbiased, "eps": 1e-3}
    for cols in (2, 5, 70):
        x, weight, bias, g = _problem(5, cols, dtype)
        y = NORMS[0](x, weight, bias, **options)
        assert ulps(y, NORMS[0].reference(x, weight, bias, **options)) <= FORWARD_ULPS[dtype]
        check_gradients(NORMS[0], x, weight, bias, g, **options)


def test_annotated_constant_row_has_zero_deviation_gradient() -> None:
    x = torch.full((1, 4), 3.0, dtype=torch.float64).requires_grad_()
    g = torch.tensor([[1.0, 0, 0, 2]], dtype=torch.float64)
    (dx,) = torch.autograd.grad(NORMS[0](x, None, None, eps=1e-2, eps_outside=True), x, g)
    assert torch.allclose(dx, (g - g.mean()) / 1e-2)


@pytest.mark.parametrize("scale", [1e-4, 1e-8, 3e-12, 1e-12, 2e-13, 1e-13, 1e-14, 1e-20])
def test_annotated_rows_of_deviation_far_below_eps(scale: float) -> None:
    """The deviation is read off the saved rstd: where it drowns in rstd's rounding it must not explode."""
    for eps in (1e-6, 1e-6 / 0.1, 0.7 + 0.2 + 0.1):
        x, weight, bias, g = _problem(5, 64, torch.float32)
        check_gradients(NORMS[0], x * scale, weight, bias, g, eps=eps, eps_outside=True)


def _llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's LlamaRMSNorm: fp32 statistics, x_hat rounded to x's dtype, then the product."""
    wide = x.float()
    x_hat = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return weight * x_hat


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cols", [2, 33, 256, 3000])
def test_llama_casting_mode(dtype: torch.dtype, cols: int) -> None:
    """Bit for bit, but for the elements where fp32's own rounding of x * rstd decides a tie of 16 bits."""
    x, weight, _, g = _problem(16, cols, dtype)
    y = NORMS[1](x, weight, None, casting_mode="llama")
    same = (y == _llama(x, weight, 1e-6)).double().mean().item()
    assert same >= 1 - 1e-3
    assert ulps(y, _llama(x, weight, 1e-6).double()) <= 2
    # grad_weight takes the rounded x_hat.
    xr, wr = _leaves(x, weight)
    dx, dw = torch.autograd.grad(NORMS[1](xr, wr, None, casting_mode="llama"), (xr, wr), g)
    x_hat = _llama(x, torch.ones_like(weight), 1e-6).double()
    expected = (g.double() * x_hat).sum(0)
    assert (
        (dw.double() - expected).abs() <= 2 * reference.unit(dtype) * (g.double() * x_hat).abs().sum(0)
    ).all()
    plain = torch.autograd.grad(NORMS[1](xr, wr, None), xr, g)[0]
    assert torch.equal(dx, plain)


def test_casting_modes_on_the_field_report() -> None:
    """Field report B45."""
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    w = torch.tensor([1.015625, 1.0], dtype=torch.bfloat16)
    assert NORMS[1](x, w, None).tolist() == [[0.640625, 1.265625]]
    assert NORMS[1](x, w, None, casting_mode="llama").tolist() == [[0.64453125, 1.265625]]


@pytest.mark.parametrize("dtype", HALVES)
def test_out_dtype(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """A 16-bit input with an fp32 output: the bits of the input widened first; gradients likewise."""
    x, weight, bias, _ = _problem(9, 70, dtype)
    g = torch.randn(9, 70)
    parameters = (weight, bias) if norm.has_bias else (weight,)
    xr = x.clone().requires_grad_()
    y, *_ = norm.op("_forward")(xr, [70], *parameters, norm.eps, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert torch.equal(y, norm(x.float(), weight, bias))
    (dx,) = torch.autograd.grad(y, xr, g)
    wide = x.float().requires_grad_()
    (expected,) = torch.autograd.grad(norm(wide, weight, bias), wide, g)
    assert dx.dtype == dtype and torch.equal(dx, expected.to(dtype))
