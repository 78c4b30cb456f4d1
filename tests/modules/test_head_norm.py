"""HeadNorm: a weight for every head, on slices of a packed projection without a copy of the input."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import fusednorm
import reference
from conftest import NormUnderTest
from fusednorm import HeadNorm
from reference import DTYPES, ulps

H, D = 3, 20
# x_hat as test_values.FORWARD_ULPS has it, and one rounding more each for the product and the sum; 16 bits:
# the one rounding at the store.
FORWARD_ULPS = {torch.float64: 10.0, torch.float32: 6.0, torch.bfloat16: 1.0, torch.float16: 1.0}
KINDS: list[dict[str, Any]] = [{}, {"kind": "layer"}, {"kind": "layer", "bias": True}]
kinds = pytest.mark.parametrize("kw", KINDS, ids=["rms", "layer", "layer_bias"])
axes = pytest.mark.parametrize("head_axis", [-2, -3])


@pytest.fixture(params=["default", "by_rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device's own way (the CPU's: by heads), and that of all devices but the CPU."""
    if request.param == "by_rows":
        monkeypatch.setattr(HeadNorm, "_by_heads", HeadNorm._by_rows)
    return request.param  # type: ignore[no-any-return]


def _module(head_axis: int = -2, dtype: torch.dtype = torch.float32, **kw: Any) -> HeadNorm:
    module = HeadNorm(H, D, head_axis=head_axis, dtype=dtype, **kw)
    for p in module.parameters():
        nn.init.normal_(p, 0.5)
    return module


def _packed(head_axis: int, dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """qkv ``[B, T, 3, H, D]``, and its q and k as attention takes them."""
    qkv = (offset + torch.randn(2, 5, 3, H, D, dtype=torch.float64)).to(dtype)
    q, k, _ = qkv.unbind(2)
    return (qkv, q, k) if head_axis == -2 else (qkv, q.transpose(1, 2), k.transpose(1, 2))


def _reference(module: HeadNorm, x: Tensor, *parameters: Tensor) -> Tensor:
    parameters = parameters or tuple(module.parameters())
    bias = parameters[1] if len(parameters) > 1 else None
    return reference.head_norm(x, parameters[0], bias, module.kind, module.head_axis, module.eps)


@kinds
@axes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("way")
def test_values_and_grads(kw: dict, head_axis: int, dtype: torch.dtype) -> None:
    """Parameters of every dtype; slices as their contiguous copies, bit for bit."""
    for parameter_dtype in DTYPES:
        module = _module(head_axis, parameter_dtype, **kw)
        for offset in (0.0, 1e4 if dtype in (torch.float32, torch.float64) else 1.0):
            for x in _packed(head_axis, dtype, offset)[1:]:
                y = module(x)
                assert y.dtype == dtype and y.is_contiguous()
                assert ulps(y.flatten(), _reference(module, x).flatten()) <= FORWARD_ULPS[dtype]
                assert torch.equal(module(x.contiguous()), y)

                leaves = [x.detach().requires_grad_(), *module.parameters()]
                wide = [t.detach().double().requires_grad_() for t in leaves]
                g = torch.randn(x.shape, dtype=torch.float64).to(dtype)
                grads = torch.autograd.grad(module(leaves[0]), leaves, g)
                wants = torch.autograd.grad(_reference(module, *wide), wide, g.double())
                # Sums over 20 columns or 10 rows, in fp32 (fp64): 8 ulps of the largest (fp64's reference
                # is rounded as often: 16); 16 bits: the rounding at the store.
                for grad, want, of in zip(grads, wants, leaves, strict=True):
                    assert grad.dtype == of.dtype and grad.shape == of.shape
                    limit = 16 if grad.dtype == torch.float64 else 8
                    if grad.dtype == torch.float64 and dtype != torch.float64:
                        grad, limit = grad.float(), 8  # accumulated in fp32
                    assert ulps(grad.flatten(), want.flatten()) <= limit


@axes
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_equal_weights_are_the_plain_norm(head_axis: int, kind: str) -> None:
    """With the same weight for every head, that of the module with a weight (D,)."""
    module = HeadNorm(H, D, head_axis=head_axis, kind=kind)
    shared = torch.randn(D)
    plain = fusednorm.RMSNorm(D, 1e-6) if kind == "rms" else fusednorm.LayerNorm(D, 1e-6, bias=False)
    with torch.no_grad():
        module.weight.copy_(shared.expand(H, D))
        plain.weight.copy_(shared)
    for dtype in (torch.float32, torch.bfloat16):
        x = _packed(head_axis, dtype)[1]
        torch.testing.assert_close(module(x), plain(x))


# ---- No copy of the input ----------------------------------------------------------------------------


def _copies(call: Callable[[], Any]) -> list[str]:
    """The operators in ``call`` that copy."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    copying = ("aten::contiguous", "aten::copy_", "aten::clone", "aten::_to_copy")
    return [event.name for event in profile.events() if event.name in copying]


@axes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_norms_copy_nothing(norm: NormUnderTest, head_axis: int, dtype: torch.dtype) -> None:
    """A weight (D,): q and k slices, and transposed views of them, in forward and in backward."""
    qkv, q, k = _packed(head_axis, dtype)
    w, b = torch.ones(D, requires_grad=True), torch.zeros(D, requires_grad=True)
    for x in (q, k):
        assert not x.is_contiguous()
        x = x.detach().requires_grad_()
        g = torch.randn(2, 5, H, D).to(dtype)
        g = g if head_axis == -2 else g.transpose(1, 2)  # as it comes back through a transposition
        y = norm(x, w, b)
        assert _copies(lambda x=x: norm(x, w, b)) == []
        assert _copies(lambda y=y, x=x, g=g: torch.autograd.grad(y, [x, w], g)) == []


@kinds
@axes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norm_copies_nothing(kw: dict, head_axis: int, dtype: torch.dtype) -> None:
    """The CPU's own way: no copy, and no conversion of 16 bits."""
    module = _module(head_axis, **kw)
    for x in _packed(head_axis, dtype)[1:]:
        x = x.detach().requires_grad_()
        y = module(x)
        g = torch.randn(y.shape).to(dtype)
        assert _copies(lambda x=x: module(x)) == []
        assert _copies(lambda y=y, x=x, g=g: torch.autograd.grad(y, [x, module.weight], g)) == []


def test_saved_tensors_for_grad() -> None:
    """On the CPU: the input where it lies, the weight, and the rows' statistics."""
    module, (_, q, _) = _module(), _packed(-2, torch.bfloat16)
    q = q.detach().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(q)
    given = {t.untyped_storage().data_ptr() for t in (q, module.weight)}
    kept = [t for t in saved if t.untyped_storage().data_ptr() not in given]
    assert sum(t.numel() for t in kept) == 2 * 5 * H  # rstd


# ---- Autograd, compile, state --------------------------------------------------------------------------


@kinds
@axes
@pytest.mark.usefixtures("way")
def test_gradcheck(kw: dict, head_axis: int) -> None:
    module = HeadNorm(2, 3, head_axis=head_axis, dtype=torch.float64, eps=0.1, **kw)
    shape = (2, 2, 2, 3)
    names = [name for name, _ in module.named_parameters()]

    def f(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True)]
    leaves += [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in names]
    assert gradcheck(f, leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, leaves)


@kinds
@axes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("way")
def test_compile_and_grads(kw: dict, head_axis: int, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    module = _module(head_axis, **kw)
    x = _packed(head_axis, dtype)[1].detach().requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaves = [x, *module.parameters()]
    got, expected = (
        (y, *torch.autograd.grad(y, leaves, torch.ones_like(y))) for y in (compiled(x), module(x))
    )
    assert all(torch.equal(a, e) for a, e in zip(got, expected, strict=True))


@pytest.mark.usefixtures("way")
def test_vmap_and_jvp() -> None:
    for kw in KINDS:
        module = _module(**kw).double()
        x, t = torch.randn(4, 2, H, D).double(), torch.randn(4, 2, H, D).double()
        close = torch.testing.assert_close
        close(torch.vmap(module)(x), module(x))
        got = torch.func.jvp(module, (x,), (t,))
        close(got, torch.func.jvp(lambda x, m=module: _reference(m, x), (x,), (t,)))


@pytest.mark.usefixtures("way")
def test_threads_and_batch_do_not_change_bits() -> None:
    module, x = HeadNorm(8, 64, kind="layer", bias=True), torch.randn(64, 16, 8, 64).to(torch.bfloat16)
    torch.set_num_threads(1)
    y = module(x)
    torch.set_num_threads(2)
    assert torch.equal(module(x), y) and torch.equal(module(x[3:4]), y[3:4])


@pytest.mark.usefixtures("way")
def test_requires_grad_and_zero_rows() -> None:
    for kw in KINDS:
        module = _module(**kw)
        x = torch.randn(2, 5, H, D)
        kept = x.clone()
        module(x).sum().backward()
        assert torch.equal(x, kept) and all(p.grad is not None for p in module.parameters())
        with torch.no_grad():
            assert not module(x).requires_grad
        module.requires_grad_(False)
        assert not module(x).requires_grad and module(x.requires_grad_()).requires_grad
        assert module(torch.randn(0, 5, H, D)).shape == (0, 5, H, D)


def test_state_and_copies() -> None:
    for kw in KINDS:
        module, other = _module(**kw), HeadNorm(H, D, **kw)
        assert list(module.state_dict()) == (["weight", "bias"] if kw.get("bias") else ["weight"])
        assert other.weight.eq(1).all() and (other.bias is None or not other.bias.any())
        other.load_state_dict(module.state_dict(), strict=True)
        x = torch.randn(2, 5, H, D)
        for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin(x), module(x)) and repr(twin) == repr(module)
        module.reset_parameters()
        assert module.weight.eq(1).all()
    assert repr(HeadNorm(3, 20)) == "HeadNorm(3, 20, kind='rms', head_axis=-2, eps=1e-06, bias=False)"


@pytest.mark.usefixtures("way")
def test_eps_none_is_rms_norms() -> None:
    x = torch.randn(2, 5, H, D) * 1e-4
    for dtype in (torch.float32, torch.bfloat16):
        y = HeadNorm(H, D, eps=None)(x.to(dtype))
        assert torch.equal(y, fusednorm.functional.rms_norm(x.to(dtype), [D]))


# ---- Errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_axis", "shape", "expected"),
    [
        (-2, (2, 5, 4, D), rf"\[\*, {H}, {D}\] \(head_axis=-2\), got \[2, 5, 4, {D}\]"),
        (-2, (2, 5, H, 8), rf"\[\*, {H}, {D}\] \(head_axis=-2\), got \[2, 5, {H}, 8\]"),
        (-2, (2, H, 5, D), rf"\[\*, {H}, {D}\] \(head_axis=-2\), got"),
        (-3, (2, 5, H, D), rf"\[\*, {H}, T, {D}\] \(head_axis=-3\), got"),
        (-3, (H, D), rf"\[\*, {H}, T, {D}\] \(head_axis=-3\), got \[{H}, {D}\]"),
        (-2, (D,), rf"got \[{D}\]"),
    ],
)
def test_bad_input(head_axis: int, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match="fusednorm.HeadNorm: input: expected shape .*" + expected):
        HeadNorm(H, D, head_axis=head_axis)(torch.randn(shape))


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected a positive number, got 0"),
        ({"head_dim": -1}, "head_dim: expected a positive number, got -1"),
        ({"kind": "batch"}, 'kind: expected "rms" or "layer", got \'batch\''),
        ({"head_axis": 1}, r"head_axis: expected -2 .* or -3 .*, got 1"),
        ({"bias": True}, 'bias: expected False with kind="rms", got True'),
        ({"kind": "layer", "eps": None}, 'eps: expected a number with kind="layer", got None'),
        ({"eps": float("nan")}, "eps: expected a finite number, got nan"),
    ],
)
def test_bad_arguments(kw: dict, message: str) -> None:
    with pytest.raises(ValueError, match="fusednorm.HeadNorm: " + message):
        HeadNorm(**{"num_heads": H, "head_dim": D, **kw})


def test_weight_of_another_shape() -> None:
    """A checkpoint whose weight is one for all heads (D,) is not a HeadNorm's."""
    module = HeadNorm(H, D)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.ones(D)})
    module.weight = nn.Parameter(torch.ones(D))
    with pytest.raises(ValueError, match=rf"weight: expected shape \[{H}, {D}\], got \[{D}\]"):
        module(torch.randn(2, 5, H, D))
