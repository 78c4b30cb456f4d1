"""Faults that people met in other libraries, by number: what the other test files do not hold already.

Elsewhere: B04 B12 B51 B64 B07 B89 B02 B09 (test_guarantees), B11 B14 B15 B22 B25 B37 B45 B49 B55 B65 B83
(test_values), B33 B34 B53 B56 B69 B71 B76 B90 (test_operators), B17 B38 B40 (test_errors), B42 B44 B60 B61
B66 B91 (test_modules), B03 B47 B52 (test_add_norm), B70 B72 (test_distributed), B67 B74 B80
(test_packaging), B77 (check_symbols.sh).
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusednorm
from conftest import NORMS, NormUnderTest
from reference import ulps

LN, RMS = NORMS


def _close(actual: Tensor, expected: list, tolerance: float = 2e-6) -> None:
    """Within the six digits that the reports give."""
    torch.testing.assert_close(
        actual.detach().double(), torch.tensor(expected).double(), atol=tolerance, rtol=2e-6
    )


def test_b01_every_route_keeps_the_graph() -> None:
    w = torch.tensor([1.0, 2, 3, 1], requires_grad=True)
    module = fusednorm.RMSNorm(4, eps=1e-6)
    x = torch.randn(1, 2, 4, requires_grad=True)
    for y in (RMS.op()(x, [4], w, 1e-6), RMS.op("_forward")(x, [4], w, 1e-6)[0], RMS(x, w, None), module(x)):
        assert y.requires_grad and "RmsNormBackward" in y.grad_fn.name()
    y = RMS(torch.tensor([[1.0, 2, 4]]), w := torch.tensor([1.0, 2, 3], requires_grad=True), None, eps=0.0)
    y.sum().backward()
    _close(w.grad, [0.377964, 0.755929, 1.511858])


def test_b02_sum_gives_no_gradient_to_the_input() -> None:
    x = (torch.arange(24) % 7).float().reshape(4, 6).requires_grad_()
    b = torch.zeros(6, requires_grad=True)
    LN(x, torch.ones(6), b).sum().backward()
    assert x.grad.abs().max() < 1e-6 and b.grad.tolist() == [4.0] * 6


def test_b04_a_shared_gradient() -> None:
    x = torch.tensor([1.0, 2, 4], requires_grad=True)
    h = x * 1
    (RMS(h, None, None) + h).sum().backward()
    _close(x.grad, [1.251976, 1.125988, 0.874012])


def test_b06_leading_dimensions() -> None:
    x = (torch.arange(24) % 5).float().reshape(2, 3, 4).requires_grad_()
    w, b = torch.tensor([1.0, 2, 3, 4], requires_grad=True), torch.zeros(4, requires_grad=True)
    LN(x, w, b).backward((torch.arange(24) % 3).float().reshape(2, 3, 4))
    _close(w.grad, [-1.238724, -3.200971, 2.443153, 2.929028])
    assert b.grad.tolist() == [6.0] * 4
    _close(x.grad[0, 0], [-1.252197, 0.178883, 3.398811, -2.325497])


def test_b09_strided_rows() -> None:
    x = (torch.arange(24) % 7).float().reshape(4, 6)
    _close(LN(x.t(), None, None)[0], [-1.646462, 0.987877, 0.548821, 0.109764])
    _close(LN(x[:, ::2], None, None)[0], [-1.224743, 0, 1.224743])
    assert LN(x[:, :1].expand(4, 6), None, None).abs().max() == 0


def test_b11_large_offsets() -> None:
    _close(
        LN(torch.tensor([5e4, 50001, 50003, 50006]), None, None), [-1.091088, -0.654653, 0.218218, 1.527524]
    )
    near = torch.tensor([3e6, 3e6 + 1, 3e6 + 2, 3e6 + 5])
    _close(LN(near, None, None), [-1.069043, -0.534522, 0, 1.603565])
    steps = (8000 + 0.002 * torch.arange(12, dtype=torch.float64)).float()
    _close(LN(steps, None, None)[:4], [-1.437884, -1.182260, -0.926636, -0.671013])


@pytest.mark.parametrize("cols", [1, 2, 3, 5, 7, 9, 17, 31, 33, 1023, 1025])
def test_b13_padded_lanes_add_nothing(norm: NormUnderTest, cols: int) -> None:
    x = 100 + torch.randn(2, cols)
    assert (norm(x, None, None).double() - norm.reference(x, None, None)).abs().max() < 2e-6
    _close(LN(torch.tensor([100.0, 101, 102]), None, None), [-1.224736, 0, 1.224736])


def test_b15_mixed_dtypes() -> None:
    x = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.bfloat16, requires_grad=True)
    w = torch.tensor([1.001, 0.999, 1, 2], requires_grad=True)
    y = RMS(x, w, None)
    assert y.tolist() == [[0.365234375, 0.73046875, 1.09375, 2.921875]]
    y.backward(torch.ones_like(y))
    _close(w.grad, [0.365148, 0.730297, 1.095445, 1.460594])
    assert x.grad.dtype == torch.bfloat16


def test_b19_the_weight_is_applied_once() -> None:
    x, w = torch.tensor([[1.0, 2]]), torch.tensor([2.0, 2])
    module = fusednorm.RMSNorm(2, eps=1e-6)
    module.load_state_dict({"weight": w})
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = module(x)
    for y in (RMS(x, w, None), RMS.op()(x, [2], w, 1e-6), module(x), module.eval()(x), compiled(x), autocast):
        _close(y, [[1.264911, 2.529822]])


@pytest.mark.parametrize(("eps", "expected"), [(1e-6, 0.999445), (1e-5, 0.994490), (1e-4, 0.948683)])
def test_b22_eps_reaches_every_route(eps: float, expected: float) -> None:
    x = torch.full((1, 4), 0.03)
    module = fusednorm.RMSNorm(4, eps=eps)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for y in (RMS(x, None, None, eps=eps), RMS.op()(x, [4], None, eps), module(x), compiled(x)):
        _close(y, [[expected] * 4])


def test_b23_gradients_are_orthogonal() -> None:
    x = torch.tensor([[0.0, 1, 2, 5]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    y = LN(x, w, None)
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 0, 0, 2]], dtype=torch.float64))
    assert abs(dx.sum().item()) < 1e-12 and abs((dx * y.detach() / w).sum().item()) < 1e-4


def test_b27_channels_last() -> None:
    x = (torch.arange(96) % 11).float().reshape(2, 3, 4, 4).to(memory_format=torch.channels_last)
    y = LN(x, None, None, dims=2)
    assert y.is_contiguous()
    _close(y[0, 0, 0], [-1.322679, -0.997097, -0.671514, -0.345932])
    last = x.permute(0, 2, 3, 1)
    assert torch.equal(LN(last, None, None), LN(last.contiguous(), None, None))


def test_b32_more_than_2_to_the_31_elements(norm: NormUnderTest) -> None:
    rows, cols = 2**20 + 1, 2048
    needed = 2 * rows * cols * 2 + 2**30
    meminfo = Path("/proc/meminfo").read_text().split()
    available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    if available < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free memory, this machine has {available >> 30}")
    row = torch.randn(cols).to(torch.bfloat16)
    x = torch.empty(rows, cols, dtype=torch.bfloat16)
    x[:] = row
    x[-1].neg_()
    with torch.no_grad():
        y = norm(x, None, None)
    assert torch.equal(y[-1], -y[0]) and torch.equal(y[0], norm(row, None, None))
    assert ulps(y[-1:], norm.reference(x[-1:], None, None)) <= 1


def test_b42_gradients_of_halves_add_up(norm: NormUnderTest) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    grads = []
    for part in (x, x[:3], x[3:]):
        w = torch.ones(4, dtype=torch.float64, requires_grad=True)
        norm(part, w, None).square().sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(grads[1] + grads[2], grads[0])


def test_b76_options_survive_a_program(tmp_path) -> None:
    """Saved with eps=None and without a bias, loaded in a fresh process that imports fusednorm."""
    import subprocess
    import sys

    model = torch.nn.Sequential(fusednorm.LayerNorm(8, bias=False), fusednorm.RMSNorm(8))
    x = torch.randn(2, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "values.pt")
    code = (
        "import sys, torch, fusednorm; d = sys.argv[1]; x, y = torch.load(d + '/values.pt');"
        "assert torch.equal(torch.export.load(d + '/model.pt2').module()(x), y); print('same bits')"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert run.stdout.strip() == "same bits", run.stderr


@pytest.mark.parametrize("casting_mode", ["default", "llama"])
def test_b81_decompositions_for_other_exporters(casting_mode: str) -> None:
    """ONNX and the like get torch's operators, with eps kept."""
    model = torch.nn.Sequential(
        fusednorm.LayerNorm(8, eps=1e-12, weight_offset=0.5),
        fusednorm.RMSNorm(8, casting_mode=casting_mode),
        fusednorm.LayerNorm(8, eps=1e-3, eps_outside=True, unbiased=True),
        fusednorm.LayerNorm(8, eps=1e-3, unbiased=True, elementwise_affine=False),
    )
    x = torch.randn(2, 8)
    program = torch.export.export(model, (x,)).run_decompositions(fusednorm.decompositions())
    assert "fusednorm" not in str(program.graph) and "1e-12" in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_decompositions_take_mixed_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(
        fusednorm.LayerNorm(8, weight_offset=1.0, dtype=weight_dtype),
        fusednorm.LayerNorm(8, eps_outside=True, dtype=weight_dtype),
        fusednorm.RMSNorm(8, dtype=weight_dtype),
    )
    x = torch.randn(2, 8).to(x_dtype)
    program = torch.export.export(model, (x,)).run_decompositions(fusednorm.decompositions())
    y = program.module()(x)
    assert y.dtype == x_dtype
    torch.testing.assert_close(y, model(x))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_b124_a_gradient_narrower_than_the_input(
    norm: NormUnderTest, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """An output that was cast to fewer bits: as with the gradient converted first, to the bit."""
    narrow, dtype = dtypes
    x, w, b, r = (torch.randn(s, dtype=dtype) for s in ((5, 33), (33,), (33,), (5, 33)))
    g = torch.randn(5, 33).to(narrow)
    parameters = (w, b) if norm.has_bias else (w,)
    ops, eps = torch.ops.fusednorm, norm.eps
    _, *statistics = norm.op("_forward")(x, [33], *parameters, eps)
    got, expected = (
        norm.op("_backward")(grad, x, [33], *statistics, *parameters, eps, [True] * 3)
        for grad in (g, g.to(dtype))
    )
    assert all(torch.equal(a, e) and a.dtype == e.dtype for a, e in zip(got, expected, strict=True))
    _, s, *statistics = getattr(ops, f"add_{norm.name}_forward")(x, r, [33], *parameters, eps)
    backward = getattr(ops, f"add_{norm.name}_backward")
    got, expected = (
        backward(grad, r, s, [33], *statistics, *parameters, eps, dtype, [True] * 4)
        for grad in (g, g.to(dtype))
    )
    assert all(torch.equal(a, e) and a.dtype == e.dtype for a, e in zip(got, expected, strict=True))
    on_meta = [[t.to("meta") for t in tensors] for tensors in ((g, x), statistics, parameters)]
    meta = norm.op("_backward")(*on_meta[0], [33], *on_meta[1], *on_meta[2], eps, [True] * 3)
    assert meta[0].dtype == dtype
    with pytest.raises(
        RuntimeError, match="grad_output: expected the input's dtype BFloat16 or Float, got Half"
    ):
        norm.op("_backward")(g.half(), x.bfloat16(), [33], *statistics, *parameters, eps, [True] * 3)
