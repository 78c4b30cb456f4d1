"""The modules as replacements of torch's: state, construction, representation, options."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fusednorm
import reference
from conftest import NormUnderTest


def _variants(norm: NormUnderTest) -> list[dict]:
    common = [{}, {"elementwise_affine": False}, {"eps": 1e-3}]
    return common + ([{"bias": False}] if norm.has_bias else [])


def test_state_dict_both_ways(norm: NormUnderTest) -> None:
    """Field report B44."""
    for kw in _variants(norm):
        for shape in (8, (2, 4)):
            ours, theirs = norm.module(shape, **kw), norm.torch_module(shape, **kw)
            assert list(ours.state_dict()) == list(theirs.state_dict())
            with torch.no_grad():
                for p in theirs.parameters():
                    p.normal_()
            ours.load_state_dict(theirs.state_dict(), strict=True)
            theirs.load_state_dict(ours.state_dict(), strict=True)
            x = torch.randn(3, 2, 4) if shape == (2, 4) else torch.randn(3, 8)
            torch.testing.assert_close(ours(x), theirs(x))


def test_repr_is_torchs(norm: NormUnderTest) -> None:
    """Field report B91."""
    for kw in _variants(norm):
        assert repr(norm.module((4,), **kw)) == repr(norm.torch_module((4,), **kw))
    changed = repr(norm.module(4, weight_offset=1.0, input_scale=0.5))
    assert changed.endswith(", weight_offset=1.0, input_scale=0.5)")


def test_they_are_torchs_classes(norm: NormUnderTest) -> None:
    """Field report B61."""
    module, other = norm.module(8), norm.torch_module(8)
    assert isinstance(module, norm.torch_module) and "Norm" in type(module).__name__
    for name in ("normalized_shape", "eps", "elementwise_affine"):
        assert getattr(module, name) == getattr(other, name)
    assert type(module.weight) is nn.Parameter
    module.weight.sequence_parallel = True  # field report B42: a trainer's marker
    assert module.to(torch.float64).weight.sequence_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies(norm: NormUnderTest, dtype: torch.dtype) -> None:
    module = norm.module(8, dtype=dtype, weight_offset=0.5, init_gain=0.25)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    x = torch.randn(3, 8, dtype=dtype)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert repr(twin) == repr(module) and torch.equal(twin(x), module(x))
        assert twin.weight.data_ptr() != module.weight.data_ptr()


def test_meta_device_initialisation(norm: NormUnderTest) -> None:
    """Field report B66."""
    module = norm.module(8, device="meta", dtype=torch.bfloat16)
    assert module.weight.is_meta
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 8 and module.weight.dtype == torch.bfloat16
    assert not norm.has_bias or module.bias.tolist() == [0.0] * 8
    skipped = nn.utils.skip_init(norm.module, 8)
    assert skipped.weight.shape == (8,)
    norm.module(8, elementwise_affine=False).reset_parameters()


def test_initial_gain(norm: NormUnderTest) -> None:
    """The gain starts at init_gain, whatever the offset."""
    module = norm.module(8, weight_offset=1.0, init_gain=0.1)
    assert torch.allclose(module.weight, torch.tensor(-0.9))
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), 0.1 * norm.module(8)(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_input_scale_is_an_eps(norm: NormUnderTest, dtype: torch.dtype) -> None:
    c = 2.0**-6  # a power of two: c * x is exact, so both sides are the same numbers
    variants = [{}, {"eps": 1e-2}] + ([{"eps": 1e-2, "eps_outside": True}] if norm.has_bias else [])
    for kw in variants:
        x = torch.randn(5, 64, dtype=dtype)
        scaled, plain = norm.module(64, input_scale=c, **kw), norm.module(64, **kw)
        torch.testing.assert_close(scaled(x), plain(c * x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_input_scale_against_float64(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """Norm(c x; eps), forward and backward, at the usual c of 0.02; with RMSNorm's eps None too."""
    for eps in (1e-5,) if norm.has_bias else (1e-5, None):
        module = norm.module(64, eps, input_scale=0.02, init_gain=0.1).to(dtype)
        x = torch.randn(5, 64, dtype=torch.float64).to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        if eps is None:
            eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
        expected = norm.reference(0.02 * wide, module.weight, getattr(module, "bias", None), eps=eps)
        y = module(x)
        assert reference.ulps(y, expected) <= (8 if dtype == torch.float64 else 4)  # test_values.FORWARD_ULPS
        g = torch.randn(5, 64, dtype=torch.float64).to(dtype)
        grads = torch.autograd.grad(y, [x, module.weight], g)
        wants = torch.autograd.grad(expected, [wide, module.weight], g.double())
        for grad, want in zip(grads, wants, strict=True):
            assert reference.ulps(grad.flatten(), want.flatten()) <= 8  # sums over 5 rows and 64 columns


def test_input_scale_compiles(norm: NormUnderTest) -> None:
    """The same bits, forward and backward; with RMSNorm's eps None too."""
    for eps in (1e-5,) if norm.has_bias else (1e-5, None):
        torch.compiler.reset()
        module = norm.module(16, eps, input_scale=0.02, weight_offset=1.0, init_gain=0.1)
        x, g = torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
        y, expected = torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x)
        assert torch.equal(y, expected)
        leaves = [x, *module.parameters()]
        grads, wants = (torch.autograd.grad(output, leaves, g) for output in (y, expected))
        assert all(torch.equal(grad, want) for grad, want in zip(grads, wants, strict=True))


def test_initial_gain_of_every_option(norm: NormUnderTest) -> None:
    """init_gain with and without an offset, after reset_parameters, and where there is no weight to fill."""
    for offset in (0.0, 1.0):
        module = norm.module(8, weight_offset=offset, init_gain=0.1)
        nn.init.zeros_(module.weight)
        module.reset_parameters()
        assert torch.equal(module.weight, torch.full((8,), 0.1 - offset))
        assert not norm.has_bias or not module.bias.any()
    assert norm.module(8, elementwise_affine=False, init_gain=0.1).weight is None


def test_modules_against_torchs_with_mixed_precision(norm: NormUnderTest) -> None:
    """Field reports B60, B72: autocast on the CPU keeps the dtype; parameters get gradients of theirs."""
    model = nn.Sequential(nn.Linear(4, 4), norm.module(4), nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        h = model[1](model[0](torch.randn(3, 4)))
        assert h.dtype == torch.bfloat16
        y = model[2](h)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    bf16 = norm.module(4).to(torch.bfloat16)
    assert bf16(torch.randn(3, 4)).dtype == torch.float32


def test_existing_modules_become_ours_by_class(norm: NormUnderTest) -> None:
    """Field report B61: training flag, dtype, requires_grad, hooks, tied parameters, optimizers live on."""
    shared = norm.torch_module(8, eps=1e-3, dtype=torch.bfloat16)
    shared.weight.requires_grad_(False)
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.ModuleDict({"a": shared, "b": shared, "c": norm.torch_module(8)}).eval()
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), shared.weight
    expected = model["a"](x)
    for module in model.modules():
        if type(module) is norm.torch_module:
            module.__class__ = norm.module
    assert type(model["a"]) is norm.module and model["a"] is model["b"] and not model["a"].training
    assert model["a"].weight is weight and not weight.requires_grad
    torch.testing.assert_close(model["a"](x), expected)
    assert calls == [1, 1] and repr(model["a"]) == repr(norm.torch_module(8, eps=1e-3))
    assert torch.equal(copy.deepcopy(model["c"])(x), model["c"](x))


def test_training_flag_changes_nothing(norm: NormUnderTest) -> None:
    module, x = norm.module(8), torch.randn(3, 8)
    assert torch.equal(module.train()(x), module.eval()(x))


def test_build_info() -> None:
    info = fusednorm.build_info()
    assert set(info) == {
        "version", "torch", "compiler", "cuda", "cuda_architectures", "torch_cpu_capability", "cpu_kernels",
        "caches",
    }  # fmt: skip
    assert all(info["caches"][level] > 0 for level in ("l1", "l2", "last_level"))
    assert info["caches"]["source"] in ("cpuid", "sysconf", "environment", "defaults")
    assert info["version"] == fusednorm.__version__
    assert torch.__version__.startswith(info["torch"].split("+")[0])
    widest = {"DEFAULT": ["portable"], "AVX2": ["portable", "avx2"]}
    allowed = widest.get(info["torch_cpu_capability"], ["portable", "avx2", "avx512", "avx512bf16"])
    assert info["cpu_kernels"] in allowed


def test_parameters_that_are_no_parameters(norm: NormUnderTest) -> None:
    """A parametrization, ``functional_call`` with other tensors, an attribute in a parameter's place."""
    x = torch.randn(3, 8)
    plain, doubled = norm.module(8), norm.module(8)
    with torch.no_grad():
        doubled.weight.fill_(2.0)
    expected = doubled(x)

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    parametrized = norm.module(8)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", Double())
    assert torch.equal(parametrized(x), expected)
    swapped = {"weight": torch.full((8,), 2.0)} | ({"bias": torch.zeros(8)} if norm.has_bias else {})
    assert torch.equal(torch.func.functional_call(plain, swapped, (x,)), expected)
    del plain.weight
    plain.weight = torch.full((8,), 2.0)
    assert torch.equal(plain(x), expected)
