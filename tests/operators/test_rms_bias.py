"""RMSNorm's bias: y = x * rstd * w + b, and its gradient, through every route."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.optests import opcheck

import fusednorm
import reference
from fusednorm import functional
from reference import DTYPES, ulps

# The kernels' bounds of test_values.py: fp32 sums in blocks, then one rounding at the store.
ULPS = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}
OPTIONS: list[dict[str, Any]] = [{}, {"weight_offset": 1.0}, {"eps_outside": True}]
EPS = 0.1


def _problem(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((rows, cols), (cols,), (cols,), (rows, cols))
    x, w, b, g = (torch.randn(s).to(dtype) for s in shapes)
    return x, w, b, g


def _reference(x: Tensor, w: Tensor | None, b: Tensor, **options: Any) -> Tensor:
    return reference.rms_norm(x, w, EPS, **options) + b.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 7), (9, 257), (70, 1025), (33, 5000)])
def test_values_and_gradients(dtype: torch.dtype, options: dict[str, Any], rows: int, cols: int) -> None:
    x, w, b, g = _problem(rows, cols, dtype)
    for t in (x, w, b):
        t.requires_grad_()
    y = functional.rms_norm(x, (cols,), w, EPS, bias=b, **options)
    assert ulps(y, _reference(x, w, b, **options)) <= ULPS[dtype]
    got = torch.autograd.grad(y, (x, w, b), g)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(_reference(*wide, **options), wide, g.double())
    plain = functional.rms_norm(x, (cols,), w, EPS, **options)
    dx, dw = torch.autograd.grad(plain, (x, w), g)
    assert torch.equal(got[0], dx) and torch.equal(got[1], dw)  # a bias changes neither
    # A sum over rows in fp32 (fp64), rounded once: sqrt(rows) of its unit roundoff, and half an ulp.
    bound = 1 + (4 * rows**0.5 if dtype in (torch.float64, torch.float32) else 0)
    assert ulps(got[2].unsqueeze(0), expected[2].unsqueeze(0)) <= bound
    for mask in itertools.product((False, True), repeat=3):  # only what is asked for, with the same bits
        asked = [t for t, wanted in zip((x, w, b), mask, strict=True) if wanted]
        if asked:
            again = torch.autograd.grad(functional.rms_norm(x, (cols,), w, EPS, bias=b, **options), asked, g)
            chosen = [t for t, wanted in zip(got, mask, strict=True) if wanted]
            assert all(torch.equal(s, t) for s, t in zip(again, chosen, strict=True))


def test_bias_without_weight_and_of_another_dtype() -> None:
    x, _, b, g = _problem(6, 40, torch.bfloat16)
    bias = b.double().requires_grad_()
    y = functional.rms_norm(x, (40,), eps=EPS, bias=bias)
    assert y.dtype == torch.bfloat16 and ulps(y, _reference(x, None, bias.float())) <= 1
    (db,) = torch.autograd.grad(y, bias, g)
    assert db.dtype == torch.float64 and torch.allclose(db, g.double().sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_llama_rounds_before_the_product(dtype: torch.dtype) -> None:
    x, w, b, _ = _problem(8, 300, dtype)
    y = functional.rms_norm(x, (300,), w, EPS, bias=b, casting_mode="llama")
    x_hat = functional.rms_norm(x, (300,), None, EPS, casting_mode="llama")
    assert torch.equal(y, (x_hat.double() * w.double() + b.double()).to(torch.float32).to(dtype))


FP64, FP32, BF16, FP16 = DTYPES


@pytest.mark.parametrize(
    "dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, BF16), (FP64, FP64)], ids=str
)
def test_residual_add(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    dtype, residual_dtype = dtypes
    x, w, b, g = _problem(5, 33, dtype)
    residual, g_sum = (torch.randn(5, 33).to(residual_dtype) for _ in range(2))
    leaves = [t.requires_grad_() for t in (x, residual, w, b)]
    y, s = functional.add_rms_norm(x, residual, (33,), w, EPS, alpha=0.5, bias=b)
    assert torch.equal(s, reference.residual_sum(x.detach(), residual.detach(), 0.5))
    assert ulps(y, _reference(s.detach(), w, b)) <= max(ULPS[dtype], 1)
    got = torch.autograd.grad((y, s), leaves, (g, g_sum))
    without, s2 = functional.add_rms_norm(x, residual, (33,), w, EPS, alpha=0.5)
    expected = torch.autograd.grad((without, s2), leaves[:3], (g, g_sum))
    assert all(torch.equal(a, e) for a, e in zip(got, expected, strict=False))
    assert torch.allclose(got[3].double(), g.double().sum(0), rtol=2**-7)
    with torch.no_grad():
        in_place = residual.detach().clone()
        again = torch.ops.fusednorm.add_rms_norm_(x, in_place, (33,), w, EPS, alpha=0.5, bias=b)
    assert torch.equal(again, y) and torch.equal(in_place, s)


def test_derivatives_and_transforms() -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (5,)))

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.rms_norm(x, (5,), w, EPS, bias=b)

    assert gradcheck(function, (x, w, b), check_forward_ad=True) and gradgradcheck(function, (x, w, b))
    assert torch.allclose(torch.func.vmap(function, (0, None, None))(x, w, b), function(x, w, b))
    per_sample = torch.func.vmap(torch.func.grad(lambda b, x: function(x, w, b).sum()), (None, 0))(b, x)
    assert torch.allclose(per_sample, torch.ones(3, 5).double())
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(f(x, w, b).square().sum(), (x, w, b)) for f in (function, compiled)]
    assert all(torch.allclose(a, c) for a, c in zip(*gradients, strict=True))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        again = torch.autograd.grad(function(x, w, b).square().sum(), (x, w, b))
    assert all(torch.allclose(a, c) for a, c in zip(gradients[0], again, strict=True))
    ops = torch.ops.fusednorm
    x, w, b = (t.detach().float() for t in (x, w, b))
    opcheck(ops.rms_norm.default, (x, (5,), w, EPS), {"bias": b})
    rstd = ops.rms_norm_forward.default(x, (5,), w, EPS, bias=b)[1]
    opcheck(ops.rms_norm_backward.default, (x, x, (5,), rstd, w, EPS, [True] * 3), {"bias": b})


def test_errors() -> None:
    x, w, b, _ = _problem(3, 6, torch.float32)
    with pytest.raises(
        RuntimeError, match=r"rms_norm: bias: expected shape \[6\] \(normalized_shape\), got \[5\]"
    ):
        functional.rms_norm(x, (6,), w, bias=b[:5])
    with pytest.raises(RuntimeError, match="rms_norm: bias: expected dtype"):
        functional.rms_norm(x, (6,), w, bias=b.int())


def test_modules() -> None:
    norm = fusednorm.RMSNorm(6, eps=EPS, bias=True)
    assert torch.equal(norm.bias, torch.zeros(6)) and list(norm.state_dict()) == ["weight", "bias"]
    assert "bias=True" in repr(norm) and "bias" not in repr(fusednorm.RMSNorm(6))
    assert fusednorm.RMSNorm(6).bias is None and list(fusednorm.RMSNorm(6).state_dict()) == ["weight"]
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(3, 6)
    assert ulps(norm(x), _reference(x, norm.weight, norm.bias)) <= 4
    norm(x).sum().backward()
    assert norm.bias.grad is not None and torch.equal(norm.bias.grad, torch.full((6,), 3.0))
    add = fusednorm.AddRMSNorm(6, eps=EPS, bias=True)
    add.load_state_dict(norm.state_dict())
    assert torch.equal(add(x, x)[0], norm(2 * x))
    converted = torch.nn.RMSNorm(6, eps=EPS)
    converted.__class__ = fusednorm.RMSNorm  # has no bias, and no attribute of that name
    assert torch.equal(converted(x), fusednorm.RMSNorm(6, eps=EPS)(x))
    norms = (norm, fusednorm.RMSNorm(6, bias=True))
    blocks = [fusednorm.Residual(torch.nn.Linear(6, 6), n, placement="pre") for n in norms]
    assert torch.equal(fusednorm.ResidualStack(blocks)(x), torch.nn.Sequential(*blocks)(x))


def test_decomposition() -> None:
    op = torch.ops.fusednorm.rms_norm.default
    x, w, b, _ = _problem(3, 6, torch.float32)
    y = fusednorm.decompositions()[op](x, (6,), w, EPS, bias=b)
    assert torch.allclose(y, op(x, (6,), w, EPS, bias=b))
