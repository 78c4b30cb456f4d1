"""What a build with CUDA promises without a GPU: autocast, errors, plans.

The kernels of the CUDA and AutocastCUDA keys are called by key, on CPU or fake tensors; values on a GPU are
tested in test_cuda.py, the CUDA kernels themselves in test_simt.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm
from conftest import NormUnderTest
from reference import HALVES, ulps

HAS_CUDA = fusednorm.build_info()["cuda"] is not None
cuda_build = pytest.mark.skipif(not HAS_CUDA, reason="this build has no CUDA")


def _under(key: torch._C.DispatchKey, op: Any, *args: Any) -> Any:
    return op.redispatch(torch._C.DispatchKeySet(key), *args)


@cuda_build
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_gives_fp32_without_a_cast(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """As torch 2.15 lists both norms; but what is kept is the 16-bit input (field report B89)."""
    x = torch.randn(5, 70).to(dtype).requires_grad_()
    w = torch.randn(70).to(dtype).requires_grad_()
    parameters = [w, torch.randn(70).requires_grad_()] if norm.has_bias else [w]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = _under(torch._C.DispatchKey.AutocastCUDA, norm.op(), x, [70], *parameters, norm.eps)
    assert y.dtype == torch.float32
    assert [t.dtype for t in saved if t.shape == x.shape] == [dtype]
    expected = norm.reference(x, w, parameters[-1])
    assert ulps(y, expected) <= 4  # as test_values.py has it for fp32
    grads = torch.autograd.grad(y.square().sum(), (x, *parameters))
    assert [g.dtype for g in grads] == [t.dtype for t in (x, *parameters)]


@cuda_build
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_autocast_of_the_residual_add(norm: NormUnderTest, residual_dtype: torch.dtype) -> None:
    """The output is fp32, the stream keeps its dtype; in place, too."""
    x, r = torch.randn(5, 70).to(torch.bfloat16).requires_grad_(), torch.randn(5, 70).to(residual_dtype)
    op = getattr(torch.ops.fusednorm, f"add_{norm.name}").default
    y, s = _under(torch._C.DispatchKey.AutocastCUDA, op, x, r, [70])
    assert (y.dtype, s.dtype) == (torch.float32, residual_dtype)
    wide = x.detach().float().requires_grad_()
    expected = op(wide, r, [70])
    assert torch.equal(y, expected[0]) and torch.equal(s, expected[1])
    (dx,), (want,) = (torch.autograd.grad(o[0].square().sum(), t) for o, t in (((y, s), x), (expected, wide)))
    assert dx.dtype == torch.bfloat16 and torch.equal(dx, want.to(torch.bfloat16))
    in_place = getattr(torch.ops.fusednorm, f"add_{norm.name}_").default
    z = _under(torch._C.DispatchKey.AutocastCUDA, in_place, x.detach(), r, [70])
    assert torch.equal(z, y) and torch.equal(r, s)


@cuda_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_leaves_wide_inputs(norm: NormUnderTest, dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, dtype=dtype)
    y = _under(torch._C.DispatchKey.AutocastCUDA, norm.op(), x, [8])
    assert torch.equal(y, norm.op()(x, [8]))


@cuda_build
@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
def test_autocast_of_group_norm(dtype: torch.dtype) -> None:
    """fp32 for 16 bits, of the input widened first; what is wide already stays."""
    x = torch.randn(2, 6, 5).to(dtype).requires_grad_()
    w, b = torch.randn(6).to(dtype), torch.randn(6)
    op = torch.ops.fusednorm.group_norm.default
    y = _under(torch._C.DispatchKey.AutocastCUDA, op, x, 3, w, b, 1e-5)
    wide = x.detach().to(torch.float32 if dtype in HALVES else dtype).requires_grad_()
    expected = op(wide, 3, w, b, 1e-5)
    assert y.dtype == wide.dtype and torch.equal(y, expected)
    (dx,), (want,) = (torch.autograd.grad(o.square().sum(), t) for o, t in ((y, x), (expected, wide)))
    assert dx.dtype == dtype and torch.equal(dx, want.to(dtype))


@cuda_build
def test_autocast_is_what_the_functions_meet(norm: NormUnderTest) -> None:
    """Through the dispatcher, with the CUDA tensors there can be without a GPU."""
    was = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.empty(5, 8, device="cuda", dtype=torch.bfloat16)
            assert norm(x, None, None).dtype == torch.float32
            assert norm(x.double(), None, None).dtype == torch.float64
    finally:
        torch.set_autocast_enabled("cuda", was)
    with FakeTensorMode():
        x = torch.empty(5, 8, device="cuda", dtype=torch.bfloat16)
        assert norm(x, None, None).dtype == torch.bfloat16


@cuda_build
def test_two_devices(norm: NormUnderTest) -> None:
    """Field report B38, on the CUDA key; a real pair of devices is in test_cuda.py."""
    x, w = torch.randn(2, 4), torch.ones(4, device="meta")
    with pytest.raises(RuntimeError, match=f"fusednorm::{norm.name}: weight: expected on the input's device"):
        _under(torch._C.DispatchKey.CUDA, norm.op(), x, [4], w)


@cuda_build
def test_build_info_names_the_architectures() -> None:
    assert fusednorm.build_info()["cuda_architectures"]


@pytest.mark.skipif(HAS_CUDA, reason="this build has CUDA")
def test_cuda_tensor_on_a_cpu_build(norm: NormUnderTest) -> None:
    with pytest.raises(RuntimeError, match="fusednorm was built without CUDA"):
        _under(torch._C.DispatchKey.CUDA, norm.op(), torch.randn(2, 4), [4])


def test_explain_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = fusednorm.explain((8192, 4096), torch.bfloat16, 90)
    text = capsys.readouterr().out
    assert "8192 rows of 4096 bfloat16 on sm_90" in text and "registers" in text
    forward, backward = plan["forward"], plan["backward"]
    assert forward["threads_per_row"] * forward["units"] * forward["columns"] >= 4096
    assert backward["launches"] == 1 and backward["partial_share"] < 0.05
    assert set(backward["quantisation_loss"]) == {108, 132, 148, 170}
    assert fusednorm.explain((3, 4, 5), norm="rms_norm", normalized_dims=2)["backward"]["groups"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 8), torch.int64), "dtype: expected float64, float32, bfloat16 or float16, got int64"),
        (((), torch.float32), "shape: expected at least normalized_dims = 1"),
        (((4, 0), torch.float32), "shape: expected rows of 1 column at least, got 4 rows of 0"),
    ],
)
def test_explain_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fusednorm.explain(*arguments)
    with pytest.raises(RuntimeError, match="norm: expected layer_norm or rms_norm"):
        fusednorm.explain((4, 8), norm="batch_norm")
    with pytest.raises(RuntimeError, match="out_dtype: expected"):
        fusednorm.explain((4, 8), torch.float32, out_dtype=torch.bfloat16)
