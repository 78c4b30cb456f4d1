"""RMSNorm with eps outside the root: x / (rms + eps), as some models have it (field report B112)."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fusednorm
import reference
from fusednorm import functional
from reference import DTYPES, ulps

OUTSIDE: dict[str, Any] = {"eps_outside": True}
# The kernels' bounds of test_values.py: fp32 sums in blocks, then one rounding at the store.
ULPS = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}


def _problem(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, w, g = torch.randn(rows, cols), torch.randn(cols), torch.randn(rows, cols)
    return x.to(dtype), w.to(dtype), g.to(dtype)


def test_b112() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    y = functional.rms_norm(x, (2,), eps=0.5, **OUTSIDE)
    assert torch.allclose(y, torch.tensor([[0.743396, 0.991195]]).double(), atol=1e-6)  # six digits are given
    (dx,) = torch.autograd.grad(y[0, 0], x)
    assert torch.allclose(dx, torch.tensor([[0.169644, -0.104206]]).double(), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 5, 70, 1025])
def test_values_and_gradients(dtype: torch.dtype, cols: int) -> None:
    x, w, g = _problem(5, cols, dtype)
    x[1] = 0  # its derivative is taken as that of x / eps
    x.requires_grad_(), w.requires_grad_()
    y = functional.rms_norm(x, (cols,), w, 0.1, **OUTSIDE)
    expected = reference.rms_norm(x, w, 0.1, **OUTSIDE)
    assert ulps(y, expected) <= ULPS[dtype]
    dx, dw = torch.autograd.grad(y, (x, w), g)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    ex, ew = torch.autograd.grad(reference.rms_norm(wide[0], wide[1], 0.1, **OUTSIDE), wide, g.double())
    keep = torch.arange(5) != 1  # torch's root has no derivative at 0
    # Two products and a difference more than forward: twice its bound, and an ulp of a sum over 5 rows.
    assert ulps(dx[keep], ex[keep]) <= 2 * ULPS[dtype] + 4
    assert torch.allclose(dx[1].double(), (g[1].double() * w.double() / 0.1).detach(), rtol=2**-7)
    assert ulps(dw.unsqueeze(0), ew.nan_to_num().unsqueeze(0)) <= 2 * ULPS[dtype] + 4


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_residual_add(residual_dtype: torch.dtype) -> None:
    x, w, _ = _problem(5, 33, torch.bfloat16)
    residual = torch.randn(5, 33).to(residual_dtype)
    y, s = functional.add_rms_norm(x, residual, (33,), w, 0.1, alpha=0.5, **OUTSIDE)
    assert torch.equal(s, reference.residual_sum(x, residual, 0.5))
    assert ulps(y, reference.rms_norm(s, w, 0.1, **OUTSIDE)) <= 1
    with torch.no_grad():
        in_place = residual.clone()
        again = torch.ops.fusednorm.add_rms_norm_(x, in_place, (33,), w, 0.1, alpha=0.5, **OUTSIDE)
    assert torch.equal(again, y) and torch.equal(in_place, s)


def test_derivatives_and_transforms() -> None:
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))

    def function(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, (5,), w, 0.1, **OUTSIDE)

    assert gradcheck(function, (x, w), check_forward_ad=True) and gradgradcheck(function, (x, w))
    assert torch.allclose(torch.func.vmap(function, (0, None))(x, w), function(x, w))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(f(x, w).square().sum(), (x, w)) for f in (function, compiled)]
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        again = torch.autograd.grad(function(x, w).square().sum(), (x, w))
    assert all(torch.allclose(a, b) for a, b in zip(gradients[0], again, strict=True))


def test_module() -> None:
    norm = fusednorm.RMSNorm(6, eps=0.5, eps_outside=True, input_scale=0.25)
    x = torch.randn(3, 6)
    assert "eps_outside=True" in repr(norm)
    assert ulps(norm(x), reference.rms_norm(0.25 * x, norm.weight, 0.5, **OUTSIDE)) <= 4
    assert ulps(fusednorm.AddRMSNorm(6, eps=0.5, eps_outside=True)(x, x)[0],
                reference.rms_norm(2 * x, norm.weight, 0.5, **OUTSIDE)) <= 4  # fmt: skip
    assert "eps_outside" in str(inspect.signature(fusednorm.RMSNorm))


def test_decomposition() -> None:
    op = torch.ops.fusednorm.rms_norm.default
    x, w = torch.randn(3, 6), torch.randn(6)
    y = fusednorm.decompositions()[op](x, (6,), w, 0.5, **OUTSIDE)
    assert torch.allclose(y, op(x, (6,), w, 0.5, **OUTSIDE))
