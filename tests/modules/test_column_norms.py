"""BatchNorm: values, gradients, masks, running averages, synchronisation, state."""

import copy
import os
import pickle
import socket
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusednorm
import reference
from reference import DTYPES, HALVES, ulps, unit

SHAPES = [(2, 3), (7, 5), (4, 6, 5), (300, 17)]


def _mask(shape: tuple[int, ...]) -> Tensor:
    """Some padding, and at least two real positions."""
    mask = torch.rand(shape) < 0.6
    mask.view(-1)[:2] = True
    return mask


def _module(features: int, **kw: Any) -> fusednorm.BatchNorm:
    """With weight, bias and running averages that are not the first ones."""
    module = fusednorm.BatchNorm(features, **kw)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
        if module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return module


def _column_ulps(actual: Tensor, expected: Tensor) -> float:
    """In ulps of each column's largest value."""
    return ulps(actual.flatten(0, -2).t(), expected.flatten(0, -2).t())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype, shape: tuple[int, ...], masked: bool) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype).requires_grad_()
    mask = _mask(shape[:-1]) if masked else None
    module = _module(shape[-1], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    mean, var = module.running_mean.double().clone(), module.running_var.double().clone()
    g = torch.randn(shape).to(dtype)
    y = module(x, mask)
    grads = torch.autograd.grad(y, (x, module.weight, module.bias), g)
    assert y.dtype == dtype and y.is_contiguous()

    leaves = [t.detach().double().requires_grad_() for t in (x, module.weight, module.bias)]
    expected, batch_mean, batch_var = reference.batch_norm(*leaves, mask=mask)
    wanted = torch.autograd.grad(expected, leaves, g.double())
    # Sums, root and affine round some ten times in the accumulation type, the store once (1/2 ulp).
    few = 0.51 if dtype in HALVES else 16
    assert _column_ulps(y, expected) <= few
    # grad_input is a difference, so what rounds is g * weight / std, however little of it is left (two rows:
    # a millionth); and then the store.
    std = (batch_var * (1 - 1 / (x[..., 0].numel() if mask is None else int(mask.sum()))) + 1e-5).sqrt()
    scale = (g.double().abs().flatten(0, -2).amax(0) * module.weight / std).abs()
    allowed = 16 * min(unit(dtype), unit(torch.float32)) * scale + 0.51 * unit(dtype) * wanted[0].abs()
    assert ((grads[0] - wanted[0]).abs() <= allowed + torch.finfo(dtype).smallest_normal * unit(dtype)).all()
    for grad, want in zip(grads[1:], wanted[1:], strict=True):
        assert grad.dtype == module.weight.dtype
        assert ulps(grad, want) <= 32
    tracked = (
        (module.running_mean, 0.9 * mean + 0.1 * batch_mean),
        (module.running_var, 0.9 * var + 0.1 * batch_var),
    )
    for running, want in tracked:
        assert ulps(running, want) <= 4
    assert module.num_batches_tracked == 1
    module.eval()
    with torch.no_grad():
        want = (x.double() - module.running_mean.double()) / (module.running_var.double() + 1e-5).sqrt()
        want = want * module.weight.double() + module.bias.double()
        assert _column_ulps(module(x, mask), want) <= few


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [50, 20000])
def test_large_mean(rows: int, dtype: torch.dtype, masked: bool) -> None:
    """Field report B11. torch's own is off by 2e4 fp32 ulps at 1000 rows, and beyond use at 100000."""
    x = (torch.randn(rows, 3) * 8 + 1e4).to(dtype)
    mask = _mask((rows,)) if masked else None
    module = fusednorm.BatchNorm(3, momentum=1.0)
    y = module(x, mask)
    expected, mean, variance = reference.batch_norm(x, mask=mask)
    assert _column_ulps(y, expected) <= (0.51 if dtype == torch.float16 else 8)
    assert ulps(module.running_mean, mean) <= 1
    assert ulps(module.running_var, variance) <= 8


def test_constant_column_is_its_bias() -> None:
    """Field report B55, for a column."""
    module = _module(2)
    x = torch.full((31, 2), 3e5).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert torch.equal(y, module.bias.expand(31, 2))
    assert x.grad.abs().max() <= 1e-4 and torch.equal(module.weight.grad, torch.zeros(2))


def test_gradients_of_first_and_second_order() -> None:
    module = _module(3, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    leaves = (x, module.weight, module.bias)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    def masked(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x, mask))
        return y[mask]  # what padding does to the statistics is left out of the gradient, by definition

    for function in (call, masked):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)
    module.eval()
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("requires", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(requires: tuple[bool, ...]) -> None:
    module = _module(3)
    x = torch.randn(5, 3)
    leaves = (x, module.weight, module.bias)
    for tensor, wanted in zip(leaves, requires, strict=True):
        tensor.requires_grad_(wanted)
    module(x).sum().backward()
    assert [t.grad is not None for t in leaves] == list(requires)
    with torch.no_grad():
        assert not module(x).requires_grad


@pytest.mark.parametrize("garbage", [0.0, 1e30, torch.inf, torch.nan])
def test_padding_reaches_nothing_else(garbage: float) -> None:
    """Whatever stands in padding, and whatever gradient arrives there, the rest is as without it."""
    x = torch.randn(4, 6, 5)
    mask = _mask((4, 6))
    x[~mask] = garbage
    module = _module(5)
    alone = copy.deepcopy(module)

    x_all, x_real = x.clone().requires_grad_(), x[mask].clone().requires_grad_()
    y_all, y_real = module(x_all, mask), alone(x_real)
    g = torch.randn(4, 6, 5)
    y_real.backward(g[mask])
    y_all.backward(torch.where(mask.unsqueeze(-1), g, 0), retain_graph=True)
    close = {"rtol": 1e-5, "atol": 1e-5}  # sums of 14 and of 24 numbers, in another order
    torch.testing.assert_close(y_all[mask], y_real, **close)
    torch.testing.assert_close(x_all.grad[mask], x_real.grad, **close)
    assert torch.equal(x_all.grad[~mask], torch.zeros(int((~mask).sum()), 5))
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, alone.get_parameter(name).grad, **close)
    for name, b in module.named_buffers():
        torch.testing.assert_close(b, alone.get_buffer(name), **close)

    (grad,) = torch.autograd.grad(y_all, x_all, g)  # now with a gradient at padding
    torch.testing.assert_close(grad[mask], x_real.grad, **close)
    scale = module.weight / (reference.batch_norm(x_real)[2] * (len(x_real) - 1) / len(x_real) + 1e-5).sqrt()
    torch.testing.assert_close(grad[~mask], (g[~mask] * scale).float(), **close)


@pytest.mark.parametrize(
    "kw", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_as_torchs(kw: dict) -> None:
    ours, theirs = fusednorm.BatchNorm(5, **kw), nn.BatchNorm1d(5, **kw)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs).replace("BatchNorm1d", "BatchNorm") and isinstance(ours, nn.BatchNorm1d)
    for _ in range(3):
        x = torch.randn(6, 5)
        torch.testing.assert_close(ours(x), theirs(x))
        x = torch.randn(2, 3, 5)
        torch.testing.assert_close(ours(x), theirs(x.mT).mT)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.mT).mT)
    fresh, theirs_fresh = fusednorm.BatchNorm(5, **kw), nn.BatchNorm1d(5, **kw)
    fresh.load_state_dict(theirs.state_dict(), strict=True)
    theirs_fresh.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(fresh.eval()(x), theirs_fresh.eval()(x.mT).mT)
    theirs.__class__ = fusednorm.BatchNorm
    torch.testing.assert_close(theirs(x), ours(x))


def test_copies_and_meta_device() -> None:
    module = _module(5, sync=True)
    x = torch.randn(6, 5)
    expected = copy.deepcopy(module)(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module) and repr(twin).endswith(", sync=True)")
        assert torch.equal(twin(x), expected)
    module = fusednorm.BatchNorm(5, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    torch.testing.assert_close(module(x), nn.BatchNorm1d(5)(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameters", DTYPES, ids=str)
def test_dtypes_mix(dtype: torch.dtype, parameters: torch.dtype) -> None:
    """Field report B65: the output has the input's dtype, gradients that of their tensor."""
    module = _module(3, dtype=parameters)
    x = torch.randn(8, 3).to(dtype).requires_grad_()
    for _ in range(2):
        y = module(x)
        y.sum().backward()
        assert y.dtype == dtype and x.grad.dtype == dtype and module.running_mean.dtype == parameters
        assert all(p.grad.dtype == parameters for p in module.parameters())
        expected = reference.batch_norm(x, module.weight, module.bias)[0]
        if module.training:
            assert _column_ulps(y, expected) <= (0.51 if dtype in HALVES else 32)
        module.eval()


def test_zero_rows() -> None:
    module = _module(3)
    state = copy.deepcopy(module.state_dict())
    for shape in ((0, 3), (0, 4, 3), (2, 0, 3)):
        for mask in (None, torch.ones(shape[:-1], dtype=torch.bool)):
            x = torch.randn(shape, requires_grad=True)
            y = module(x, mask)
            y.sum().backward()
            assert y.shape == shape and x.grad.shape == shape
    assert all(torch.equal(p.grad, torch.zeros(3)) for p in module.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    assert module.eval()(torch.randn(0, 3)).shape == (0, 3)


def test_strides_and_inputs_kept() -> None:
    """Field reports B02, B09, B12."""
    module = _module(4)
    base = torch.randn(4, 6)
    for x in (base.t(), torch.randn(6, 8)[:, ::2], torch.randn(6, 1).expand(6, 4), torch.randn(3, 4, 2).mT):
        x = x.detach()
        before = x.clone()
        leaf, packed = x.requires_grad_(), x.detach().clone().contiguous().requires_grad_()
        y, want = module(leaf), module(packed)
        for g in (torch.ones(()).expand(y.shape), torch.randn(y.shape).mT.contiguous().mT):
            g_before = g.clone()
            a = torch.autograd.grad(y, leaf, g, retain_graph=True)[0]
            b = torch.autograd.grad(want, packed, g.contiguous(), retain_graph=True)[0]
            assert torch.equal(a, b) and torch.equal(g, g_before)
        assert torch.equal(y, want) and torch.equal(x, before) and y.is_contiguous()


def test_only_the_input_is_kept_for_backward() -> None:
    """Guarantee 5, field report B89: no fp32 copy of a bf16 input."""
    module, x = _module(64), torch.randn(512, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        module(x, _mask((512,)))
    assert sum(t.numel() for t in kept) <= x.numel() + 512 + 6 * 64
    assert [t.dtype for t in kept if t.numel() == x.numel()] == [torch.bfloat16]


def test_two_hundred_fifty_six_ones_in_bf16() -> None:
    """Field report B07: parameter gradients are not summed in the activations' dtype."""
    module = fusednorm.BatchNorm(1)
    x = torch.tensor([1.0, 3.0]).repeat(2048).unsqueeze(1).bfloat16()
    y = module(x)
    y.backward(torch.ones_like(y))
    assert module.bias.grad.item() == 4096.0
    y = module(x)
    y.backward(y.detach())
    assert abs(module.weight.grad.item() - 4096.0) <= 16.0  # y is 1 - 5e-6, in bf16 1


def _check(match: str, function: Any, *args: Any, **kw: Any) -> None:
    with pytest.raises(ValueError, match=match):
        function(*args, **kw)


@pytest.mark.parametrize("name", ["BatchNorm", "PowerNorm"])
def test_errors(name: str) -> None:
    module = getattr(fusednorm, name)(5)
    x, start = torch.randn(4, 7, 5), f"fusednorm.{name}: "
    _check(start + r"input: expected 5 features .* got shape \[4, 7, 6\]", module, torch.randn(4, 7, 6))
    _check(start + r"input: expected 2 or 3 dimensions .* got shape \[5\]", module, torch.randn(5))
    _check(start + "input: expected 2 or 3 dimensions", module, torch.randn(2, 3, 4, 5))
    _check(
        start + "input: expected float64, .* got torch.int64", module, torch.zeros(4, 5, dtype=torch.int64)
    )
    _check(start + r"mask: expected shape \[4, 7\], got \[4, 6\]", module, x, torch.ones(4, 6).bool())
    _check(start + r"mask: expected shape \[4, 7\], got \[4, 7, 1\]", module, x, torch.ones(4, 7, 1).bool())
    _check(start + "mask: expected torch.bool, .* got torch.int64", module, x, torch.ones(4, 7).long())
    _check(start + "mask: expected device cpu, got meta", module, x, torch.ones(4, 7, device="meta").bool())
    _check(start + "mask: expected at least one True", module, x, torch.zeros(4, 7).bool())
    _check(start + "eps: expected a finite number, got nan", type(module), 5, eps=torch.nan)
    assert module.num_batches_tracked == 0
    module.eval()
    assert module(x, torch.zeros(4, 7).bool()).shape == x.shape  # evaluation asks the batch nothing


def test_one_value_per_channel_is_torchs_error() -> None:
    module, one = fusednorm.BatchNorm(5), "Expected more than 1 value per channel when training"
    mask = torch.zeros(4, 7, dtype=torch.bool)
    mask[1, 2] = True
    for call in (lambda m: m(torch.randn(1, 5)), lambda m: m(torch.randn(1, 1, 5))):
        _check(one, call, module)
        _check(one, call, fusednorm.BatchNorm(5, track_running_stats=False).eval())
    _check(one, nn.BatchNorm1d(5), torch.randn(1, 5))
    _check(one + r".*\[4, 7, 5\] with one real position", module, torch.randn(4, 7, 5), mask)
    assert module.num_batches_tracked == 0 and torch.equal(module.running_mean, torch.zeros(5))
    module.eval()(torch.randn(1, 5))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kw", [{}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_compile(kw: dict, masked: bool) -> None:
    """Field report B53."""
    torch._dynamo.reset()
    module = _module(5, **kw)
    plain = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    args = (_mask((4, 6)),) if masked else ()
    for _ in range(2):
        x = torch.randn(4, 6, 5, requires_grad=True)
        g = torch.randn(4, 6, 5)
        got = torch.autograd.grad(compiled(x, *args), (x, *module.parameters()), g)
        want = torch.autograd.grad(plain(x, *args), (x, *plain.parameters()), g)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        for (name, a), b in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    if masked:
        with pytest.raises(RuntimeError, match="Expected more than 1 value per channel"):
            compiled(x, torch.zeros(4, 6).bool())
    module.eval(), plain.eval()
    torch.testing.assert_close(compiled(x, *args), plain(x, *args))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_not_another_batch(reentrant: bool) -> None:
    """Field report B56."""
    model = nn.Sequential(nn.Linear(4, 5), _module(5), nn.ReLU())
    plain = copy.deepcopy(model)
    x = torch.randn(6, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    grad, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(grad, x.grad)
    for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_autocast() -> None:
    """Field report B60."""
    model = nn.Sequential(nn.Linear(4, 5), fusednorm.BatchNorm(5), fusednorm.PowerNorm(5))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(6, 4))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# Two processes against one on the whole batch, in float64: what is left is the order of sums.
SPLITS = {"even": (4, 4), "uneven": (7, 1), "empty": (8, 0)}


def _whole(masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(3)
    x, g = torch.randn(8, 3, 5, dtype=torch.float64) + 50, torch.randn(8, 3, 5, dtype=torch.float64)
    mask = _mask((8, 3))
    mask[-1] = False  # the second process of "uneven" has nothing but padding
    return x, g, mask if masked else None


def _synchronised(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # a deprecated collective
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for sizes in SPLITS.values():
        for masked in (False, True):
            x, g, mask = _whole(masked)
            module = fusednorm.BatchNorm(5, dtype=torch.float64, sync=True)
            plain = fusednorm.BatchNorm(5, dtype=torch.float64)
            with torch.no_grad():
                for m in (module, plain):
                    m.weight.copy_(torch.arange(1.0, 6.0))
            x.requires_grad_()
            y = plain(x, mask)
            # Twice: the gradient, and the gradient of its square.
            (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
            second, *parameters = torch.autograd.grad(
                grad.square().sum() + (y * g).sum(), (x, *plain.parameters())
            )

            mine = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], 8)
            part = x.detach()[mine].requires_grad_()
            y_part = module(part, None if mask is None else mask[mine])
            (grad_part,) = torch.autograd.grad(y_part, part, g[mine], create_graph=True)
            loss = grad_part.square().sum() + (y_part * g[mine]).sum()
            second_part, *parameters_part = torch.autograd.grad(loss, (part, *module.parameters()))
            for p in parameters_part:
                dist.all_reduce(p)  # a trainer's work
            pairs = [(y_part, y[mine]), (grad_part, grad[mine]), (second_part, second[mine])]
            pairs += list(zip(parameters_part, parameters, strict=True))
            pairs += list(zip(module.buffers(), plain.buffers(), strict=True))
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
            # Evaluation asks nobody: only one process calls.
            if rank == 0:
                torch.testing.assert_close(module.eval()(part), plain.eval()(part))
    # One value per channel in each process is enough together; one in all of them is not, anywhere.
    module = fusednorm.BatchNorm(5, sync=True)
    assert module(torch.randn(1, 5)).isfinite().all()
    _check("Expected more than 1 value per channel", module, torch.randn(1 - rank, 5))
    _check("mask: expected at least one True", module, torch.randn(2, 5), torch.zeros(2).bool())
    # fp32 far from 0: merged about a common point, not by differences of squares.
    torch.manual_seed(4)
    x = torch.randn(4000, 3) + 1e4 + torch.arange(4000).unsqueeze(1) * 1e-3
    y = fusednorm.BatchNorm(3, sync=True)(x[2000 * rank :][:2000])
    assert _column_ulps(y, reference.batch_norm(x)[0][2000 * rank :][:2000]) <= 8
    module, part = fusednorm.BatchNorm(3, sync=True), x[2000 * rank :][:7].requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(call(part).square()[:, 0].sum(), part)[0] for call in (module, compiled)]
    torch.testing.assert_close(*grads)
    group = dist.new_group([rank], use_local_synchronization=True)
    alone = fusednorm.BatchNorm(3, sync=True, process_group=group)
    assert torch.equal(alone(x[:9]), fusednorm.BatchNorm(3)(x[:9]))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # see test_distributed.py


def test_two_processes_are_one_batch() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_synchronised, args=(port,), nprocs=2, join=True)
    x = torch.randn(6, 5)  # without torch.distributed: the process's own
    assert torch.equal(fusednorm.BatchNorm(5, sync=True)(x), fusednorm.BatchNorm(5)(x))
