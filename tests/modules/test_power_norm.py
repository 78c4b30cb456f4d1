"""PowerNorm: its recurrences, and its state under checkpointing, accumulation and evaluation."""

import copy
import gc
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusednorm
import reference
from fusednorm.torch_support.recomputation import Runs
from reference import DTYPES, HALVES, ulps


def _module(features: int, **kw: Any) -> fusednorm.PowerNorm:
    module = fusednorm.PowerNorm(features, **kw)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return module


def _reference(module: fusednorm.PowerNorm) -> reference.PowerNorm:
    return reference.PowerNorm(
        module.num_features, module.eps, module.alpha_fwd, module.alpha_bkw, module.warmup_iters
    )


def _column_ulps(actual: Tensor, expected: Tensor) -> float:
    return ulps(actual.flatten(0, -2).t(), expected.flatten(0, -2).t())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("warmup", [0, 2, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps(dtype: torch.dtype, warmup: int, masked: bool) -> None:
    """Five steps of forward and backward against the recurrences in float64."""
    module = _module(
        5, warmup_iters=warmup, alpha_fwd=0.8, alpha_bkw=0.7, dtype=dtype if dtype == torch.float64 else None
    )
    expected = _reference(module)
    # Each step rounds some ten times in the accumulation type; the state carries that on, shrinking.
    few = 32
    for _ in range(5):
        x = (torch.randn(4, 6, 5) * 2).to(dtype).requires_grad_()
        mask = torch.rand(4, 6) < 0.6 if masked else None
        g = torch.randn(4, 6, 5).to(dtype)
        y = module(x, mask)
        grads = torch.autograd.grad(y, (x, module.weight, module.bias), g)
        y_want, used = expected.forward(x, module.weight, module.bias, mask)
        assert y.dtype == dtype and y.is_contiguous()
        assert _column_ulps(y, y_want) <= (0.51 if dtype in HALVES else few)
        wanted = expected.backward(x.detach(), module.weight, used, g, mask)
        assert _column_ulps(grads[0], wanted[0]) <= (0.51 if dtype in HALVES else few)
        assert ulps(grads[1], wanted[1]) <= few and ulps(grads[2], wanted[2]) <= few
        assert ulps(module.running_mean_square, expected.psi_square) <= few
        assert ulps(module.running_projection, expected.nu) <= few
    assert module.num_batches_tracked == 5
    state = copy.deepcopy(module.state_dict())
    module.eval()
    x = torch.randn(7, 5).to(dtype)
    y = module(x)
    assert _column_ulps(y, expected.evaluate(x, module.weight, module.bias)) <= (
        0.51 if dtype in HALVES else few
    )
    y.sum().backward()
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_scaling(groups: int) -> None:
    module = _module(6, num_groups=groups, warmup_iters=1, eps=1e-3)
    expected = _reference(module)
    for _ in range(3):
        x = (torch.randn(2, 4, 6) * 100).requires_grad_()
        wide = x.detach().double().requires_grad_()
        scaled = reference.group_scaling(wide, groups, 1e-3)
        y_want, used = expected.forward(scaled, module.weight, module.bias)
        g = torch.randn(2, 4, 6)
        grad_scaled = expected.backward(scaled.detach(), module.weight, used, g)[0]
        y = module(x)
        (grad,) = torch.autograd.grad(y, x, g)
        (want,) = torch.autograd.grad(scaled, wide, grad_scaled)
        torch.testing.assert_close(y.double(), y_want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-6)  # of numbers near 1/100
    x = torch.randn(3, 6)
    want = expected.evaluate(reference.group_scaling(x, groups, 1e-3), module.weight, module.bias)
    torch.testing.assert_close(module.eval()(x).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]], ids=str)
@pytest.mark.parametrize("warmup", [0, 2])
def test_several_forwards_before_their_backwards(warmup: int, order: list[int]) -> None:
    """Each backward uses the psi squared of its own forward, and nu as it stands."""
    module = _module(5, warmup_iters=warmup, dtype=torch.float64)
    expected = _reference(module)
    xs = [torch.randn(9, 5, dtype=torch.float64, requires_grad=True) for _ in order]
    ys = [module(x) for x in xs]
    used = [expected.forward(x.detach(), module.weight, module.bias)[1] for x in xs]
    for i in order:
        (grad,) = torch.autograd.grad(ys[i], xs[i], torch.ones_like(ys[i]))
        want = expected.backward(xs[i].detach(), module.weight, used[i], torch.ones(9, 5))[0]
        torch.testing.assert_close(grad, want)
    torch.testing.assert_close(module.running_projection, expected.nu)


def _identical(a: nn.Module, b: nn.Module) -> None:
    """Parameters' gradients and the whole state, bit for bit."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, q.grad), name
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


class _Block(nn.Module):
    """Two norms, one of them twice, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared, self.last = (
            nn.Linear(5, 5),
            _module(5, warmup_iters=3),
            _module(5, warmup_iters=0),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.linear(x))
        return self.last(nn.functional.dropout(self.shared(x.tanh()), 0.2))


def _reentrant(function: Callable, *args: Any) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def _nested_reentrant(function: Callable, *args: Any) -> Tensor:
    return _reentrant(lambda *a: _reentrant(function, *a), *args)


def _not_reentrant(function: Callable, *args: Any) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)


def _nested_not_reentrant(function: Callable, *args: Any) -> Tensor:
    return _not_reentrant(lambda *a: _not_reentrant(function, *a), *args)


def _mixed(function: Callable, *args: Any) -> Tensor:
    return _not_reentrant(lambda *a: _reentrant(function, *a), *args)


CHECKPOINTS = [_reentrant, _not_reentrant, _nested_reentrant, _nested_not_reentrant, _mixed]


@pytest.mark.parametrize("how", CHECKPOINTS, ids=lambda f: f.__name__)
def test_recomputation_leaves_no_trace(how: Callable) -> None:
    """Field report B56: five steps with a checkpoint are those without, bit for bit."""
    plain = _Block()
    model = copy.deepcopy(plain)
    for step in range(5):
        x = torch.randn(8, 5, requires_grad=True)
        grads = []
        for call in (plain, lambda x: how(model, x)):
            torch.manual_seed(step)
            call(x).square().sum().backward()
            grads.append(x.grad)
            x.grad = None
        assert torch.equal(*grads)
        _identical(model, plain)


@pytest.mark.parametrize("same", [False, True], ids=["other data", "same data"])
@pytest.mark.parametrize("order", ["first to last", "last to first", "one sum"])
@pytest.mark.parametrize("how", CHECKPOINTS, ids=lambda f: f.__name__)
def test_recomputations_of_accumulated_forwards(how: Callable, order: str, same: bool) -> None:
    """Four micro-batches forward, then their backwards: each recomputation sees what its forward saw.

    Even over the very same data, where only the place in the graph tells the forwards apart.
    """
    plain = nn.Sequential(
        nn.Linear(5, 5), _module(5, warmup_iters=1), nn.Linear(5, 5), _module(5, warmup_iters=0)
    )
    model = copy.deepcopy(plain)
    x = torch.randn(8, 5)
    xs = [(x.clone() if same else torch.randn(8, 5)).requires_grad_() for _ in range(4)]
    for module, call in ((plain, plain), (model, lambda x: how(model, x))):
        losses = [call(x).square().sum() for x in xs]
        if order == "one sum":
            sum(losses).backward()
        else:
            for loss in losses if order == "first to last" else losses[::-1]:
                loss.backward()
        grads = [x.grad for x in xs]
        for x in xs:
            x.grad = None
        if module is plain:
            wanted = grads
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    _identical(model, plain)


def test_recomputation_under_a_mask_and_group_scaling_with_frozen_parameters() -> None:
    module = _module(6, num_groups=2, warmup_iters=1).requires_grad_(False)
    twin = copy.deepcopy(module)
    for _ in range(3):
        x, mask = torch.randn(4, 3, 6, requires_grad=True), torch.rand(4, 3) < 0.7
        (a,) = torch.autograd.grad(_not_reentrant(module, x, mask).square().sum(), x)
        (b,) = torch.autograd.grad(twin(x, mask).square().sum(), x)
        assert torch.equal(a, b)
    assert all(torch.equal(p, q) for p, q in zip(module.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize("how", [_reentrant, _not_reentrant], ids=lambda f: f.__name__)
def test_recomputation_of_a_branch_without_gradient(how: Callable) -> None:
    """A forward whose graph is gone at once still runs again with the checkpoint."""
    module = _module(5, warmup_iters=0)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            a = module(x)
        return (x * a * module(2 * x).detach()).sin().exp()

    x = torch.randn(8, 5, requires_grad=True)
    how(function, x).sum().backward()
    grad, tracked = x.grad, module.running_mean_square.clone()
    x.grad = None
    module.reset_running_stats()
    function(x).sum().backward()
    assert torch.equal(grad, x.grad)
    assert torch.equal(tracked, module.running_mean_square) and module.num_batches_tracked == 2


@pytest.mark.parametrize("how", [_reentrant, _not_reentrant], ids=lambda f: f.__name__)
def test_recomputation_with_an_overflow(how: Callable) -> None:
    """A loss scaler's business: no error from here."""
    module = _module(5)
    x = torch.randn(8, 5)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    how(module, x.requires_grad_()).sum().backward()
    assert x.grad is not None and module.num_batches_tracked == 1


@pytest.mark.parametrize("how", [_reentrant, _not_reentrant], ids=lambda f: f.__name__)
def test_a_second_backward_recomputes_again(how: Callable) -> None:
    plain = _module(5, warmup_iters=0)
    model = copy.deepcopy(plain)
    x = torch.randn(8, 5, requires_grad=True)
    for module, call in ((plain, plain), (model, lambda x: how(model, x))):
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        if module is plain:
            wanted, x.grad = x.grad, None
    assert torch.equal(x.grad, wanted)
    _identical(model, plain)


def test_an_unknown_forward_inside_a_backward_is_an_error() -> None:
    """Such as a recomputation with other random numbers; a silent one would use the wrong statistics."""
    module = _module(5)
    x = torch.randn(8, 5, requires_grad=True)
    other = iter([1.0, 3.0])
    y = checkpoint(lambda x: module(x * next(other)).sin(), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="fusednorm.PowerNorm: a forward inside a backward .* last 64"):
        y.sum().backward()
    assert module.num_batches_tracked == 1


def test_forwards_are_forgotten_with_their_graph() -> None:
    module = _module(5)
    alive = [module(torch.randn(8, 5)) for _ in range(2 * Runs.KEPT)]
    assert len(module._runs._known) == 2 * Runs.KEPT
    del alive
    gc.collect()
    assert len(module._runs._known) == Runs.KEPT
    with torch.no_grad():
        for _ in range(2 * Runs.KEPT):
            module(torch.randn(8, 5))
    assert len(module._runs._known) == Runs.KEPT


def test_copies_and_state_continue_the_same() -> None:
    module = _module(5, warmup_iters=2, num_groups=1)
    module(torch.randn(8, 5)).sum().backward()
    assert list(module.state_dict()) == [
        "weight", "bias", "running_mean_square", "running_projection", "num_batches_tracked",
    ]  # fmt: skip
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = fusednorm.PowerNorm(5, warmup_iters=2, num_groups=1)
    loaded.load_state_dict(module.state_dict(), strict=True)
    twins = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
        loaded,
    ]
    for twin in twins:
        twin.zero_grad()
        assert repr(twin) == repr(module) and twin._runs is not module._runs
    module.zero_grad()
    for _ in range(3):
        x = torch.randn(8, 5, requires_grad=True)
        for each in (module, *twins):
            each(x).square().sum().backward()
    for twin in twins:
        _identical(twin, module)


def test_meta_device_and_dtypes() -> None:
    module = fusednorm.PowerNorm(5, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 5 and module.weight.dtype == torch.bfloat16
    assert module.running_mean_square.dtype == torch.float32 and module.num_batches_tracked == 0
    for dtype, parameters in itertools.product(DTYPES, DTYPES):
        module = _module(5, dtype=parameters)
        x = torch.randn(8, 5).to(dtype).requires_grad_()
        y = module(x)
        y.sum().backward()
        assert y.dtype == dtype and x.grad.dtype == dtype and module.bias.grad.dtype == parameters
        want = _reference(module).forward(x.detach(), module.weight, module.bias)[0]
        assert _column_ulps(y, want) <= (0.51 if dtype in HALVES else 32)
    half = fusednorm.PowerNorm(5).half()
    half(torch.randn(8, 5).half()).sum().backward()
    assert half.running_mean_square.dtype == torch.float16
    fusednorm.PowerNorm(5, affine=False).reset_parameters()
    assert repr(fusednorm.PowerNorm(4, num_groups=2)).endswith("warmup_iters=10000, num_groups=2)")


def test_padding_reaches_nothing_else() -> None:
    x, g = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    mask = torch.rand(4, 6) < 0.6
    x[~mask] = torch.nan
    g[~mask] = 0
    module = _module(5, warmup_iters=0)
    alone = copy.deepcopy(module)
    for _ in range(2):
        x_all, x_real = x.clone().requires_grad_(), x[mask].clone().requires_grad_()
        module(x_all, mask).backward(g)
        alone(x_real).backward(g[mask])
        torch.testing.assert_close(x_all.grad[mask], x_real.grad)
        assert torch.equal(x_all.grad[~mask], torch.zeros(int((~mask).sum()), 5))  # no term of nu
    for (name, a), b in zip(module.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    torch.testing.assert_close(module.weight.grad, alone.weight.grad)


def test_zero_rows_and_one() -> None:
    module = _module(3, warmup_iters=0)
    for mask in (None, torch.ones(0, 4, dtype=torch.bool)):
        x = torch.randn(0, 4, 3, requires_grad=True)
        y = module(x, mask)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, 4, 3)
    assert module.num_batches_tracked == 0 and module.running_mean_square.tolist() == [1.0] * 3
    assert torch.equal(module.weight.grad, torch.zeros(3))
    assert module(torch.randn(1, 3)).isfinite().all()  # a mean square of one row is one


def test_derivatives_in_evaluation_and_refused_in_training() -> None:
    module = _module(5, dtype=torch.float64, num_groups=1)
    module(torch.randn(8, 5, dtype=torch.float64))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    module.eval()
    assert torch.autograd.gradcheck(module, x) and torch.autograd.gradgradcheck(module, x)
    module.train()
    with pytest.raises(RuntimeError, match="fusednorm.PowerNorm: second derivatives are refused"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_only_the_input_is_kept_for_backward() -> None:
    """Field report B89."""
    module, x = _module(64), torch.randn(512, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        module(x)
    assert [t.dtype for t in kept if t.numel() > 64] == [torch.bfloat16]


@pytest.mark.parametrize("masked", [False, True])
def test_compile(masked: bool) -> None:
    """Evaluation in one graph; training breaks it here and computes the same, in a checkpoint too."""
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(5, 5), _module(5, warmup_iters=1, num_groups=1))
    mask = (torch.tensor([True, True, False, True]),) if masked else ()

    def run(model: nn.Sequential, x: Tensor) -> Tensor:
        return model[1](model[0](x), *mask).tanh()

    x = torch.randn(4, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its backward moves state"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(plain, x)
    compiled, twin = torch.compile(run, backend="aot_eager"), copy.deepcopy(plain)
    checkpointed, third = (
        torch.compile(lambda m, x: _not_reentrant(run, m, x), backend="aot_eager"),
        copy.deepcopy(plain),
    )
    for _ in range(3):
        x = torch.randn(4, 5)
        for call, model in ((run, plain), (compiled, twin), (checkpointed, third)):
            call(model, x).square().sum().backward()
    for other in (twin, third):
        for (name, a), b in zip(plain.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
        for a, b in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    plain.eval()
    whole = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(plain, x), run(plain, x))


def test_it_trains() -> None:
    """The approximate gradient descends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), _module(32, warmup_iters=20), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(256, 8) * 10
    target = x[:, :1].tanh()
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * target.var()


def test_errors_of_construction() -> None:
    make, start = fusednorm.PowerNorm, "fusednorm.PowerNorm: "
    for kw, message in (
        ({"alpha_fwd": 1.5}, "alpha_fwd: expected a number from 0 to 1, got 1.5"),
        ({"alpha_bkw": torch.nan}, "alpha_bkw: expected a number from 0 to 1, got nan"),
        ({"warmup_iters": -1}, "warmup_iters: expected 0 or more, got -1"),
        ({"num_groups": 4}, "num_groups: expected a divisor of num_features = 6, got 4"),
        ({"num_groups": 0}, "num_groups: expected a divisor of num_features = 6, got 0"),
        ({"eps": torch.inf}, "eps: expected a finite number, got inf"),
    ):
        with pytest.raises(ValueError, match=start + message):
            make(6, **kw)
