"""AdaptiveNorm: its formula around each norm, its strength learned and scheduled, its affine."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusednorm
from reference import DTYPES, HALVES, ulps

ADAPTIVE = {
    "LayerNorm": (lambda: fusednorm.LayerNorm(6), (4, 3, 6)),
    "RMSNorm": (lambda: fusednorm.RMSNorm(6), (4, 3, 6)),
    "BatchNorm": (lambda: fusednorm.BatchNorm(6), (4, 3, 6)),
    "PowerNorm": (lambda: fusednorm.PowerNorm(6, warmup_iters=5), (4, 3, 6)),
    "plain": (lambda: fusednorm.LayerNorm(6, elementwise_affine=False), (4, 6)),
    "two dimensions": (lambda: fusednorm.LayerNorm((3, 6)), (4, 3, 6)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (4, 6, 3, 2)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(6), (4, 6, 5)),
}


def _adaptive(make: Any, **kw: Any) -> tuple[fusednorm.AdaptiveNorm, nn.Module]:
    module = fusednorm.AdaptiveNorm(make(), **kw).double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name != "theta":
                p.normal_()
    return module, copy.deepcopy(module.norm)


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("case", ADAPTIVE)
def test_adaptive_formula(case: str, learnable: bool) -> None:
    make, shape = ADAPTIVE[case]
    module, norm = _adaptive(make, strength=0.3, learnable=learnable)
    assert getattr(module.norm, "weight", None) is None and module.weight is not None
    x = torch.randn(shape, dtype=torch.float64)
    trailing = [1] * (len(shape) - 2) if case in ("GroupNorm", "InstanceNorm") else []
    expected = 0.3 * norm(x) + 0.7 * x
    expected = expected * module.weight.view(*module.weight.shape, *trailing)
    if module.bias is not None:
        expected = expected + module.bias.view(*module.bias.shape, *trailing)
    # theta and the strength were rounded to fp32 before .double(): 0.3 is off by 1e-8
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones_like(module.weight))
    assert abs(module.strength.item() - 0.3) < 1e-6


def test_adaptive_gradients() -> None:
    module, _ = _adaptive(ADAPTIVE["BatchNorm"][0], strength=0.3)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["theta", "weight", "bias"]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *module.parameters()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adaptive_ends_are_exact(dtype: torch.dtype) -> None:
    """At 1 the norm with its affine behind it, at 0 the input; both bit for bit."""
    x = (torch.randn(5, 6) * 7).to(dtype)
    module = fusednorm.AdaptiveNorm(fusednorm.LayerNorm(6), 1.0, learnable=False)
    assert torch.equal(module(x), fusednorm.LayerNorm(6)(x))
    module.set_strength(0.0)
    assert torch.equal(module(x), x) and module(x).dtype == dtype
    module.set_strength(0.25)
    want = 0.25 * fusednorm.LayerNorm(6)(x).double() + 0.75 * x.double()  # of the norm as it was rounded
    assert ulps(module(x), want) <= (0.51 if dtype in HALVES else 2)


def test_adaptive_schedule_state_and_mask() -> None:
    module = fusednorm.AdaptiveNorm(fusednorm.BatchNorm(6), 0.0, learnable=False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(4, 3, 6), torch.tensor([[True, True, False]]).expand(4, 3)
    plain = fusednorm.BatchNorm(6)
    for strength in (0.0, 0.5, 1.0):
        module.set_strength(strength)
        want = plain(x, mask).lerp(x, 1 - strength)
        torch.testing.assert_close(module(x, mask), want)
        torch.testing.assert_close(compiled(x, mask), want)
    twin = fusednorm.AdaptiveNorm(fusednorm.BatchNorm(6), 0.0, learnable=False)
    twin.load_state_dict(module.state_dict(), strict=True)
    assert twin.strength == 1.0 and pickle.loads(pickle.dumps(module)).strength == 1.0
    assert "strength" in repr(module) and copy.deepcopy(module)(x, mask).shape == x.shape


def test_adaptive_learns_its_strength() -> None:
    torch.manual_seed(0)
    module = fusednorm.AdaptiveNorm(fusednorm.LayerNorm(16), affine=False)
    x = torch.randn(64, 16) * 3 + 1
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    target = fusednorm.LayerNorm(16)(x).detach()
    first = module.strength.item()
    for _ in range(50):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        optimizer.step()
    assert first == 0.5 and module.strength > 0.9
    assert module.norm.weight is not None and module.weight is None


def test_adaptive_moves_the_affine() -> None:
    norm = fusednorm.RMSNorm(6, init_gain=0.1)
    weight = norm.weight
    module = fusednorm.AdaptiveNorm(norm)
    assert module.weight is weight and module.bias is None and norm.weight is None
    assert [name for name, _ in module.named_parameters()] == ["theta", "weight"]
    norm.reset_parameters()
    half = fusednorm.AdaptiveNorm(fusednorm.BatchNorm(6, dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert half.theta.dtype == torch.float32 and half.weight.dtype == torch.bfloat16


def test_adaptive_errors() -> None:
    make, start = fusednorm.AdaptiveNorm, "fusednorm.AdaptiveNorm: "

    def check(message: str, function: Any, *args: Any) -> None:
        with pytest.raises(ValueError, match=message):
            function(*args)

    for strength in (0.0, 1.0, -1.0, 2.0, torch.nan):
        check(start + "strength: expected a number between 0 and 1", make, fusednorm.LayerNorm(4), strength)
    fixed = make(fusednorm.LayerNorm(4), learnable=False)
    for strength in (-0.1, 1.1, torch.nan):
        check(start + "strength: expected a number from 0 to 1", fixed.set_strength, strength)
    offset = fusednorm.LayerNorm(4, weight_offset=1.0)
    check(start + "norm: expected weight_offset=0.0", make, offset)
    assert offset.weight is not None and make(offset, affine=False).weight is None
    llama = fusednorm.RMSNorm(4, casting_mode="llama")
    check(start + "norm: expected casting_mode='default'", make, llama)
    check(start + "norm: expected a weight, normalized_shape, .* got Identity", make, nn.Identity())
