"""The fused residual operators: sums and outputs bit for bit, gradients against float64, what is kept.

``residual_out = alpha * residual + input`` and ``output`` = norm of it. As torch operators (opcheck,
derivatives, transforms, in place) they are in test_add_operators.py.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
import reference
from conftest import NORMS, NormUnderTest, of_the_cpu
from reference import DTYPES, HALVES, accumulation, residual_sum, round_once, ulps
from test_values import FORWARD_ULPS

FP32, BF16 = torch.float32, torch.bfloat16


def add_norm(
    norm: NormUnderTest,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dims: int = 1,
    **kw: Any,
) -> tuple[Tensor, Tensor]:
    """By the function; bias is ignored where there is none."""
    function = getattr(fusednorm.functional, f"add_{norm.name}")
    parameters = (weight, bias) if norm.has_bias else (weight,)
    return function(x, residual, x.shape[x.dim() - dims :], *parameters, kw.pop("eps", norm.eps), **kw)


def problem(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    residual_dtype: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """input, residual, weight, bias, grad_output, grad_residual_out."""
    residual_dtype = residual_dtype or dtype
    row = shape[-1:]
    kinds = [(shape, dtype), (shape, residual_dtype), (row, parameter_dtype or dtype)]
    kinds += [(row, parameter_dtype or dtype), (shape, dtype), (shape, residual_dtype)]
    return tuple(torch.randn(s, dtype=torch.float64).to(d) for s, d in kinds)


def gradients(
    norm: NormUnderTest,
    tensors: tuple[Tensor, ...],
    grad_output: Tensor | None,
    grad_residual_out: Tensor | None,
    **kw: Any,
) -> tuple[Tensor | None, ...]:
    """Of input, residual, weight (and bias), by autograd."""
    leaves = [t.detach().requires_grad_() for t in tensors[: 4 if norm.has_bias else 3]]
    outputs = add_norm(norm, *leaves, **kw)
    grads = (grad_output, grad_residual_out)
    used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    used_outputs, used_grads = zip(*used, strict=True)
    return torch.autograd.grad(used_outputs, leaves, used_grads, allow_unused=True)


def same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    return all(a is e if e is None else torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def by_our_norm(norm: NormUnderTest, x: Tensor, s: Tensor, *parameters: Tensor, **kw: Any) -> Tensor:
    """Our norm of the stored sum, rounded once to the input's dtype."""
    acc = accumulation(s.dtype)
    out_dtype = acc if s.dtype in HALVES and x.dtype != s.dtype else None
    tensors = parameters[: 2 if norm.has_bias else 1]
    output = norm.op("_forward")(
        s, s.shape[-1:], *tensors, kw.pop("eps", norm.eps), **kw, out_dtype=out_dtype
    )
    return round_once(output[0], x.dtype)


def check_values(norm: NormUnderTest, tensors: tuple[Tensor, ...], alpha: float, **kw: Any) -> Tensor:
    """The sum has the bits of the definition, the output those of our norm of it; returns the sum."""
    x, residual, *parameters = tensors[:4]
    y, s = add_norm(norm, x, residual, *parameters, alpha=alpha, **kw)
    assert (y.dtype, s.dtype) == (x.dtype, residual.dtype)
    assert y.is_contiguous() and s.is_contiguous()
    assert torch.equal(y, by_our_norm(norm, x, s, *parameters, **kw))
    # The coarser of what it is computed in and stored in.
    grain = max(x.dtype, accumulation(s.dtype), key=reference.unit)
    for part in reference.blocks(x):
        assert torch.equal(s[part], residual_sum(x[part], residual[part], alpha))
        assert ulps(y[part].to(grain), norm.reference(s[part], *parameters, **kw)) <= FORWARD_ULPS[grain]
    return s


def check_gradients(
    norm: NormUnderTest,
    tensors: tuple[Tensor, ...],
    alpha: float,
    use: tuple[bool, bool] = (True, True),
    **kw: Any,
) -> None:
    """Within a few ulps of the largest of the terms that a gradient is summed from (reference.bound)."""
    x, residual, weight, bias, grad_y, grad_s = tensors
    given = [g if used else None for g, used in zip((grad_y, grad_s), use, strict=True)]
    grads = gradients(norm, tensors, *given, alpha=alpha, **kw)
    acc = accumulation(residual.dtype)
    parameters = (weight, bias)[: 2 if norm.has_bias else 1]
    options = {k: v for k, v in kw.items() if k != "weight_offset"}
    gain = weight.double() + kw.get("weight_offset", 0.0)

    def check(grad: Tensor, want: Tensor, terms: Tensor) -> None:
        # test_values.py: 8 ulps of the accumulation type. Two more roundings here: alpha, and the sum.
        allowed = reference.bound(want, terms, grad.dtype, acc, 10)
        assert ((grad.double() - want).abs() <= allowed).all(), (grad.dtype, grad.shape)

    for grad, of in zip(grads, (x, residual, *parameters), strict=True):
        if use[0] or of is x or of is residual:
            assert grad.dtype == of.dtype and grad.is_contiguous()
        else:
            assert grad is None
    sums = [torch.zeros_like(gain) for _ in range(4)]  # of the parameters: what is expected, and the terms
    for part in reference.blocks(x):
        s = residual_sum(x[part], residual[part], alpha).double()
        d_sum, terms = torch.zeros_like(s), torch.zeros_like(s)
        if use[0]:
            # Detached: double() of fp64 is the caller's tensor itself, which must not require grad.
            wide = [t.detach().double().requires_grad_() for t in (s, *parameters)]
            output = norm.reference(*wide, *[None] * (3 - len(wide)), **kw)
            g = grad_y[part].double()
            d_sum, *of_parameters = torch.autograd.grad(output, wide, g)
            x_hat = norm.reference(s, None, None, **options)
            centred = s - s.mean(-1, keepdim=True) if norm.has_bias else s
            rstd = x_hat.norm(dim=-1, keepdim=True) / centred.norm(dim=-1, keepdim=True)
            terms = (rstd * (g * gain).abs().amax(-1, keepdim=True)).expand_as(s)
            for total, value in zip(sums, of_parameters, strict=False):
                total += value
            sums[2] += (g * x_hat.abs().clamp_min(1)).abs().sum(0)
            sums[3] += g.abs().sum(0)
        if use[1]:
            d_sum, terms = d_sum + grad_s[part].double(), terms + grad_s[part].double().abs()
        check(grads[0][part], d_sum, terms)
        check(grads[1][part], alpha * d_sum, abs(alpha) * terms)
    if use[0]:
        for i, grad in enumerate(grads[2:]):
            check(grad, sums[i], sums[i + 2])


# ---- Values and gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.0, 0.37, -2.5])
def test_every_pair_of_dtypes(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype, alpha: float
) -> None:
    for cols in (2, 17, 70):
        tensors = problem((5, cols), dtype, residual_dtype)
        check_values(norm, tensors, alpha)
        for use in ((True, True), (True, False), (False, True)):
            check_gradients(norm, tensors, alpha, use)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("cols", [1, 3, 8, 15, 16, 33, 128, 1023, 1025, 4097])
def test_sizes_around_vectors_and_blocks(norm: NormUnderTest, dtype: torch.dtype, cols: int) -> None:
    for residual_dtype in {dtype, FP32}:
        tensors = problem((6, cols), dtype, residual_dtype)
        check_values(norm, tensors, 1.7)
        if cols > 1:  # a single element's x_hat is 0: the bounds have nothing to scale by
            check_gradients(norm, tensors, 1.7)


@of_the_cpu
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "rows", "cols"),
    [(FP32, FP32, 1503, 1024), (FP32, FP32, 1501, 1023), (BF16, FP32, 387, 4096), (BF16, BF16, 4099, 4096)],
)
def test_beyond_the_caches(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype, rows: int, cols: int
) -> None:
    """Where rows are asked for early and gradients streamed past the caches (test_guarantees.py)."""
    tensors = problem((rows, cols), dtype, residual_dtype)
    check_values(norm, tensors, 1.0)
    check_gradients(norm, tensors, 1.0)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [FP32, BF16])
def test_parameters_of_any_dtype(
    norm: NormUnderTest, weight_dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    x, residual, weight, bias, *grads = problem((6, 40), BF16, residual_dtype, weight_dtype)
    # fp64 beside fp32 rows is rounded to fp32 first: compare with that.
    weight, bias = (t.float().to(t.dtype) for t in (weight, bias))
    tensors = (x, residual, weight, bias.half().float(), *grads)
    check_values(norm, tensors, 0.5)
    check_gradients(norm, tensors, 0.5)


def test_options(norm: NormUnderTest) -> None:
    options: list[dict[str, Any]] = [{"weight_offset": 1.0}, {"eps": 0.1}]
    if norm.has_bias:
        options += [{"eps_outside": True, "eps": 1e-3}, {"unbiased": True}]
    for kw, residual_dtype in itertools.product(options, (FP32, BF16)):
        tensors = problem((5, 33), BF16, residual_dtype)
        check_values(norm, tensors, 1.0, **kw)
        check_gradients(norm, tensors, 1.0, **kw)


def test_several_normalized_dimensions_and_no_parameters(norm: NormUnderTest) -> None:
    x, residual = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    y, s = add_norm(norm, x, residual, dims=2)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, norm(s, None, None, dims=2))
    y, s = add_norm(norm, x[0, 0], residual[0, 0])  # one row, no leading dimensions
    assert torch.equal(s, x[0, 0] + residual[0, 0]) and torch.equal(y, norm(s, None, None))


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16])
@pytest.mark.parametrize("residual_dtype", [torch.float64, FP32, BF16])
def test_eps_none_follows_the_sum(dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """norms.md: the machine epsilon of what residual_out accumulates in, whatever the input is."""
    x = torch.full((1, 8), 2.0**-12, dtype=dtype).requires_grad_()
    y, s = fusednorm.functional.add_rms_norm(x, torch.zeros(1, 8, dtype=residual_dtype), [8])
    grain = max(dtype, accumulation(residual_dtype), key=reference.unit)
    assert ulps(y.to(grain), reference.rms_norm(s)) <= FORWARD_ULPS[grain]
    assert (y[0, 0] > 0.99) == (residual_dtype == torch.float64)  # 0.577 with 2**-23
    (dx,) = torch.autograd.grad(y.sum(), x)  # backward has the same eps
    wide = s.detach().double().requires_grad_()
    eps = 2.0**-52 if residual_dtype == torch.float64 else 2.0**-23
    (want,) = torch.autograd.grad(reference.rms_norm(wide, eps=eps).sum(), wide)
    # Large terms cancel: 1 - x_hat**2, and all of it in fp64, where it is 2**-28.
    atol = 8 * reference.unit(accumulation(residual_dtype)) * 2.0**12
    torch.testing.assert_close(dx.double(), want, rtol=reference.unit(grain), atol=atol)


def test_extreme_rows(norm: NormUnderTest) -> None:
    """Rows whose squares leave the range of fp32, and offsets far from 0."""
    for scale, offset in ((1e30, 0.0), (1e-30, 0.0), (1.0, 1e5)):
        x, residual, weight, bias, *grads = problem((5, 64), FP32)
        tensors = (x * scale + offset, residual * scale, weight, bias, *grads)
        kw = {"eps": 0.0} if offset == 0 else {}
        check_values(norm, tensors, 1.0, **kw)
        if scale != 1e-30:  # its gradients exceed fp32's range
            check_gradients(norm, tensors, 1.0, **kw)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_stays_in_its_row(norm: NormUnderTest, bad: float) -> None:
    for dtype, residual_dtype in itertools.product((FP32, BF16), repeat=2):
        x, residual, weight, bias, g, h = problem((6, 37), dtype, residual_dtype)
        clean = add_norm(norm, x, residual, weight, bias)
        residual[2, 5] = bad
        y, s = add_norm(norm, x, residual, weight, bias)
        others = [0, 1, 3, 4, 5]
        assert torch.equal(y[others], clean[0][others]) and torch.equal(s[others], clean[1][others])
        assert y[2].isnan().any() and not s[2, 5].isfinite() and s[2, 6:].isfinite().all()
        dx, dr, *_ = gradients(norm, (x, residual, weight, bias), g, h)
        assert dx[others].isfinite().all() and dr[others].isfinite().all() and dx[2].isnan().any()


# ---- Field reports -------------------------------------------------------------------------------------


def test_b03_either_output_alone() -> None:
    tensors = tuple(torch.tensor(v) for v in ([1.0, -2.0], [2.0, 0.0], [1.0, 2.0]))
    of_y, of_s = torch.tensor([1.0, 10.0]), torch.tensor([5.0, 7.0])
    expected = [
        ((of_y, None), [3.741292, 5.611939], [1.176697, -7.844645]),
        ((None, of_s), [5.0, 7.0], None),
        ((of_y, of_s), [8.741292, 12.611939], [1.176697, -7.844645]),
    ]
    for wanted in itertools.product([False, True], repeat=3):
        leaves = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        y, s = fusednorm.functional.add_rms_norm(*leaves[:2], [2], leaves[2], 1e-6)
        torch.testing.assert_close(y.detach(), torch.tensor([1.176697, -1.568929]), atol=1e-6, rtol=0)
        assert s.tolist() == [3, -2]
        if not any(wanted):
            assert not y.requires_grad and not s.requires_grad
            continue
        for grads, d_sum, d_weight in expected:
            used = [(o, g) for o, g in zip((y, s), grads, strict=True) if g is not None]
            torch.autograd.backward(*zip(*used, strict=True), retain_graph=True)
            for leaf, want, value in zip(leaves, wanted, (d_sum, d_sum, d_weight), strict=True):
                assert (leaf.grad is not None) == (want and value is not None)
                if leaf.grad is not None:
                    torch.testing.assert_close(leaf.grad, torch.tensor(value), atol=2e-6, rtol=1e-6)
                    leaf.grad = None


def test_b14_sums_beyond_fp16() -> None:
    x = torch.full((1, 4), 6e4, dtype=torch.float16)
    for name in ("layer_norm", "rms_norm"):
        y, s = getattr(fusednorm.functional, f"add_{name}")(x, x, [4])
        assert s.isinf().all() and y.shape == x.shape
        wide = getattr(fusednorm.functional, f"add_{name}")(x, x.float(), [4])
        assert wide[1].tolist() == [[120000.0] * 4] and wide[0].isfinite().all()


@pytest.mark.parametrize(("eps", "expected"), [(1e-6, 0.999445), (1e-5, 0.994490), (1e-4, 0.948683)])
def test_b22_eps_is_used(eps: float, expected: float) -> None:
    x = torch.full((1, 4), 0.01)
    y, _ = fusednorm.functional.add_rms_norm(x, 2 * x, [4], None, eps)
    torch.testing.assert_close(y, torch.full((1, 4), expected), atol=2e-6, rtol=0)


def test_b40_zero_rows_and_columns(norm: NormUnderTest) -> None:
    for shape in ((0, 8), (3, 0, 8), (3, 0)):
        cols = shape[-1]
        tensors = problem(shape, FP32, BF16)
        y, s = add_norm(norm, *tensors[:4])
        assert y.shape == s.shape == shape and (y.dtype, s.dtype) == (FP32, BF16)
        dx, dr, *rest = gradients(norm, tensors, *tensors[4:])
        assert dx.shape == dr.shape == shape and all(t.tolist() == [0.0] * cols for t in rest)


def test_b47_the_norm_is_of_the_stored_sum() -> None:
    x = torch.tensor([[300.0, 2, 2, 1]], dtype=BF16)
    r = torch.tensor([[1.0, 1, -2, 0.25]], dtype=BF16)
    y, s = fusednorm.functional.add_rms_norm(x, r, [4], None, 1e-6)
    assert s.tolist() == [[300.0, 3, 0, 1.25]]
    assert torch.equal(y, torch.tensor([[2, 0.020020, 0, 0.008362]]).to(BF16))


def test_b52_alpha_scales_the_residual() -> None:
    x, r = torch.tensor([[0.5, -1, 0]]), torch.tensor([[1.0, 2, 4]])
    y, s = fusednorm.functional.add_layer_norm(x, r, [3], alpha=2.0)
    assert s.tolist() == [[2.5, 3, 8]]
    torch.testing.assert_close(y, torch.tensor([[-0.805387, -0.604040, 1.409427]]), atol=2e-6, rtol=0)
    dx, dr = torch.autograd.grad(
        fusednorm.functional.add_layer_norm(x.requires_grad_(), r.requires_grad_(), [3], alpha=2.0)[1].sum(),
        (x, r),
    )
    assert dx.tolist() == [[1, 1, 1]] and dr.tolist() == [[2, 2, 2]]


# ---- The formulas of models, in bf16 -------------------------------------------------------------------


def _hugging_face(s: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    """LlamaRMSNorm and GemmaRMSNorm, as they stand behind ``hidden = residual + hidden``."""
    wide = s.float()
    x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (x_hat * (1.0 + weight.float())).type_as(s) if gemma else weight * x_hat.to(s.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("cols", [2, 33, 256, 3000])
def test_llama_and_gemma(dtype: torch.dtype, gemma: bool, cols: int) -> None:
    options: dict[str, Any] = {"weight_offset": 1.0} if gemma else {"casting_mode": "llama"}

    def ours(x: Tensor, r: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return fusednorm.functional.add_rms_norm(x, r, [cols], weight, eps, **options)

    x, r, weight, *_ = problem((16, cols), dtype)
    y, s = ours(x, r, weight, 1e-6)
    assert torch.equal(s, r + x)
    theirs = _hugging_face(s, weight, 1e-6, gemma)
    # But for elements where the rounding of x * rstd in fp32 decides a tie of 16 bits.
    assert (y == theirs).double().mean().item() >= 1 - 1e-3
    assert ulps(y, theirs.double()) <= 2
    # Rows of +-2 with eps 0: rstd is exactly a half, so there are no such ties, and every bit is theirs.
    x = torch.where(x > 0, 3.0, -3.0).to(dtype)
    r = -x / 3
    y, s = ours(x, r, weight, 0.0)
    assert torch.equal(y, _hugging_face(s, weight, 0.0, gemma))


@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_llama_rounds_as_the_stream_is_stored(residual_dtype: torch.dtype) -> None:
    """x_hat takes the dtype of the sum: bf16 beside a bf16 stream, nothing beside one in fp32."""
    norm = NORMS[1]
    tensors = problem((9, 300), BF16, residual_dtype)
    x, residual, weight, *_ = tensors
    y, s = add_norm(norm, x, residual, weight, casting_mode="llama")
    assert torch.equal(y, by_our_norm(norm, x, s, weight, casting_mode="llama"))
    rounds = residual_dtype in HALVES
    assert torch.equal(y, add_norm(norm, x, residual, weight)[0]) != rounds
    # grad_weight takes the rounded x_hat; the gradient of the sum does not know of it.
    x_hat = by_our_norm(norm, s, s, torch.ones_like(weight), casting_mode="llama").double()
    g, h = tensors[4:]
    dx, dr, dw = gradients(norm, tensors, g, h, casting_mode="llama")
    bound = 1e-5 * (g.double() * x_hat).abs().sum(0) + reference.unit(BF16) * dw.double().abs()
    assert ((dw.double() - (g.double() * x_hat).sum(0)).abs() <= bound).all()
    assert same((dx, dr), gradients(norm, tensors, g, h)[:2])


# ---- Guarantees ----------------------------------------------------------------------------------------


def _views(t: Tensor) -> dict[str, Tensor]:
    """The values of ``t`` (4 leading dimensions) in other memory."""
    gaps = torch.zeros(*t.shape[:-1], t.shape[-1] + 5, dtype=t.dtype)[..., 2:-3].copy_(t)
    permuted = t.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4)
    steps = torch.zeros(*t.shape[:-1], t.shape[-1] * 2, dtype=t.dtype)[..., ::2].copy_(t)
    transposed = t.transpose(0, -1).contiguous().transpose(0, -1)
    return {"gaps": gaps, "permuted": permuted, "steps": steps, "transposed": transposed}


@pytest.mark.parametrize(("dtype", "residual_dtype"), [(FP32, FP32), (BF16, BF16), (BF16, FP32)])
def test_strides_each_of_its_own(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    """Field reports B02, B09: bit for bit the contiguous ones' result; and nothing given is written to."""
    tensors = problem((2, 3, 4, 5, 19), dtype, residual_dtype)
    plain = (*add_norm(norm, *tensors[:4], alpha=0.7), *gradients(norm, tensors, *tensors[4:], alpha=0.7))
    for place in (0, 1, 4, 5):
        for name, view in _views(tensors[place]).items():
            given = [*tensors[:place], view, *tensors[place + 1 :]]
            before = [t.clone() for t in given]
            results = (
                *add_norm(norm, *given[:4], alpha=0.7),
                *gradients(norm, tuple(given), *given[4:], alpha=0.7),
            )
            assert same(results, plain), (place, name)
            assert results[0].is_contiguous() and results[1].is_contiguous()
            assert same(tuple(given), tuple(before)), (place, name)


@pytest.mark.parametrize("shape", [(1, 6), (4, 1), (1, 1)])
def test_expanded_inputs_and_gradients(norm: NormUnderTest, shape: tuple[int, int]) -> None:
    """Field report B02: zero strides, as ``sum().backward()`` makes them."""
    tensors = problem((4, 6), FP32)
    for place in (0, 1, 4, 5):
        expanded = torch.randn(shape).expand(4, 6)
        given = [*tensors[:place], expanded, *tensors[place + 1 :]]
        packed = [*tensors[:place], expanded.contiguous(), *tensors[place + 1 :]]
        assert same(add_norm(norm, *given[:4]), add_norm(norm, *packed[:4]))
        assert same(gradients(norm, given, *given[4:]), gradients(norm, packed, *packed[4:]))


@pytest.mark.parametrize(("dtype", "residual_dtype"), [(FP32, FP32), (BF16, FP32), (torch.float16,) * 2])
@pytest.mark.parametrize("cols", [33, 1025])
def test_row_bits_do_not_depend_on_batch_or_alignment(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype, cols: int
) -> None:
    """Field report B51."""
    x, r, w, b, g, h = problem((300, cols), dtype, residual_dtype)
    y, s = add_norm(norm, x, r, w, b, alpha=0.7)
    dx, dr, *_ = gradients(norm, (x, r, w, b), g, h, alpha=0.7)
    for rows in (slice(0, 1), slice(299, 300), slice(3, 7), slice(40, 297)):
        part = tuple(t[rows] for t in (x, r, g, h))
        assert same(add_norm(norm, *part[:2], w, b, alpha=0.7), (y[rows], s[rows]))
        grads = gradients(norm, (*part[:2], w, b), *part[2:], alpha=0.7)
        assert same(grads[:2], (dx[rows], dr[rows]))
    for shift in (1, 3):
        moved = [
            torch.empty(t.numel() + shift, dtype=t.dtype)[shift:].view(t.shape).copy_(t) for t in (x, r, g, h)
        ]
        assert same(add_norm(norm, *moved[:2], w, b, alpha=0.7), (y, s))
        assert same(gradients(norm, (*moved[:2], w, b), *moved[2:], alpha=0.7)[:2], (dx, dr))


@pytest.mark.parametrize(("dtype", "residual_dtype"), [(FP32, FP32), (BF16, BF16), (BF16, FP32)])
def test_threads_do_not_change_bits(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    """Field report B64, and guarantee 2 for outputs."""
    tensors = problem((1500, 130), dtype, residual_dtype)
    results = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        results.append((*add_norm(norm, *tensors[:4]), *gradients(norm, tensors, *tensors[4:])))
    assert all(same(other, results[0]) for other in results[1:])


def test_parameter_gradients_accumulate_in_fp32() -> None:
    """Field report B07: sums in 16 bits stop growing at 256 (bf16)."""
    x = torch.ones(4096, 2, dtype=BF16)
    w, g = torch.ones(2, dtype=BF16), torch.ones(4096, 2, dtype=BF16)
    for residual in (torch.zeros_like(x), torch.zeros(4096, 2)):
        *_, dw = gradients(NORMS[1], (x, residual, w), g, torch.zeros_like(residual))
        assert dw.double().tolist() == pytest.approx([4096, 4096], rel=4e-3)


def test_incoming_gradients_are_not_touched_or_handed_out(norm: NormUnderTest) -> None:
    """Field report B04; one tensor may arrive at both outputs, and what leaves is none of the caller's."""
    for residual_dtype, alpha in itertools.product((FP32, BF16), (1.0, 0.5)):
        tensors = problem((6, 40), FP32, residual_dtype)
        g = tensors[4]
        h = g if residual_dtype == FP32 else tensors[5]
        before, expected = g.clone(), gradients(norm, tensors, g.clone(), h.clone(), alpha=alpha)
        assert same(gradients(norm, tensors, g, h, alpha=alpha), expected)
        for use in ((g, h), (g, None), (None, h)):
            for grad in gradients(norm, tensors, *use, alpha=alpha):
                given = {t.untyped_storage().data_ptr() for t in (*tensors, h)}
                assert grad is None or grad.untyped_storage().data_ptr() not in given
        assert torch.equal(g, before)


def test_leaves_get_gradients_of_their_own(norm: NormUnderTest) -> None:
    """One tensor is the gradient of both addends inside the graph; what .grad holds is not shared."""
    x, r, w, b, g, h = problem((6, 40), FP32)
    expected = gradients(norm, (x, r, w, b), g, h)
    x.requires_grad_(), r.requires_grad_()
    outputs = add_norm(norm, x, r, w, b)
    torch.autograd.backward(outputs, (g, h), retain_graph=True)
    assert torch.equal(x.grad, expected[0]) and torch.equal(r.grad, expected[1])
    x.grad.zero_()
    assert torch.equal(r.grad, expected[1])
    torch.autograd.backward(outputs, (g, h))
    assert torch.equal(x.grad, expected[0]) and torch.equal(r.grad, 2 * expected[1])
    # The same tensor as both addends: its gradient is that of twice itself.
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(add_norm(norm, leaf, leaf, w, b), leaf, (g, h))
    dx1, dr1, *_ = gradients(norm, (x, x, w, b), g, h)
    assert torch.equal(dx, dx1 + dr1)


def test_only_the_gradients_asked_for(norm: NormUnderTest) -> None:
    count = 4 if norm.has_bias else 3
    for residual_dtype, alpha in ((FP32, 1.0), (BF16, 1.0), (FP32, 0.5)):
        tensors = problem((7, 40), FP32, residual_dtype)
        for use in ((True, True), (True, False), (False, True)):
            given = [g if u else None for g, u in zip(tensors[4:], use, strict=True)]
            everything = gradients(norm, tensors, *given, alpha=alpha)
            for wanted in itertools.product([False, True], repeat=count):
                if not any(wanted):
                    continue
                leaves = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=False)]
                outputs = add_norm(norm, *leaves, alpha=alpha)
                used = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None]
                torch.autograd.backward(*zip(*used, strict=True))
                for leaf, w, e in zip(leaves, wanted, everything, strict=True):
                    assert (leaf.grad is not None) == (w and e is not None)
                    assert leaf.grad is None or torch.equal(leaf.grad, e)


def test_an_unused_output_costs_nothing(norm: NormUnderTest) -> None:
    """No kernel of ours runs for a gradient that arrives at the sum alone, and nothing saved is read."""
    x, r, w, b, g, h = problem((6, 40), FP32)
    x.requires_grad_(), w.requires_grad_()
    unpacked: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
        y, s = add_norm(norm, x, r, w, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        s.backward(h, retain_graph=True)
    names = {event.key for event in profile.key_averages()}
    assert not unpacked and not any("fusednorm::" in name for name in names), names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(g)
    names = {event.key for event in profile.key_averages()}
    assert f"fusednorm::add_{norm.name}_backward" in names and "aten::zeros" not in names


def test_what_is_kept_for_backward(norm: NormUnderTest) -> None:
    """The sum, the weight and the row statistics; neither addend, and no copies."""
    for residual_dtype in (BF16, FP32):
        tensors = [t.requires_grad_() for t in problem((64, 128), BF16, residual_dtype)[:4]]
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)  # noqa: B023
        with hooks, torch.autocast("cpu", BF16):
            y, s = add_norm(norm, *tensors)
        assert (y.dtype, s.dtype) == (BF16, residual_dtype)  # autocast changes nothing on the CPU
        others = [t for t in saved if t.data_ptr() not in (s.data_ptr(), tensors[2].data_ptr())]
        assert len(saved) == len(others) + 2
        assert [t.shape for t in others] == [(64,)] * (2 if norm.has_bias else 1)
        assert all(t.dtype == FP32 for t in others)
    with torch.no_grad():
        y, s = add_norm(norm, *tensors)
    assert y.grad_fn is None and s.grad_fn is None


def test_a_changed_sum_is_an_error(norm: NormUnderTest) -> None:
    """Field report B33: never a wrong gradient. The addends may change: they are not kept."""
    x, r, w, b, g, h = problem((3, 8), FP32)
    expected = gradients(norm, (x, r, w, b), g, h)
    leaf = x.clone().requires_grad_()
    branch, stream = leaf * 1, r.clone()
    y, s = add_norm(norm, branch, stream, w, b)
    branch.data.zero_(), stream.zero_()
    torch.autograd.backward((y, s), (g, h), retain_graph=True)
    assert torch.equal(leaf.grad, expected[0])
    s.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- Modules -------------------------------------------------------------------------------------------


def test_modules(norm: NormUnderTest) -> None:
    module_class = fusednorm.AddLayerNorm if norm.has_bias else fusednorm.AddRMSNorm
    x, r = torch.randn(3, 8).to(BF16), torch.randn(3, 8)
    module, plain = module_class(8, alpha=0.5, eps=1e-3), norm.torch_module(8, eps=1e-3)
    assert isinstance(module, norm.torch_module) and isinstance(module, norm.module)
    assert repr(module) == f"Add{repr(plain)[:-1]}, alpha=0.5)"
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    module.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    y, s = module(x, r)
    assert (y.dtype, s.dtype) == (BF16, FP32) and torch.equal(s, residual_sum(x, r, 0.5))
    torch.testing.assert_close(y, plain(s).to(BF16))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module) and same(twin(x, r), (y, s))
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in module.parameters())


def test_module_options(norm: NormUnderTest) -> None:
    module_class = fusednorm.AddLayerNorm if norm.has_bias else fusednorm.AddRMSNorm
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    module = module_class(8, weight_offset=1.0, init_gain=0.1, eps=1e-2)
    torch.testing.assert_close(module(x, r)[0], 0.1 * norm(x + r, None, None, eps=1e-2))
    c = 2.0**-6  # a power of two: the scaled sum is exact
    scaled, plain = module_class(8, input_scale=c), norm.module(8)
    torch.testing.assert_close(scaled(x, r)[0], plain(c * (x + r)))
    torch.testing.assert_close(scaled(x, r.double())[0], plain(c * (x.double() + r)).float())
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha: expected a finite number, got"):
            module_class(8, alpha=bad)
