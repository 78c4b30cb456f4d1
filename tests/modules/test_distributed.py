"""DTensor, SequenceParallel, DDP and FSDP2 on two gloo processes (field reports B70, B72)."""

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import fusednorm
from conftest import NORMS, NormUnderTest

WORLD = 2


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _start(rank: int, port: int, checks: list[Callable[..., None]], norm_name: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    norm = next(norm for norm in NORMS if norm.name == norm_name)
    for check in checks:
        torch.manual_seed(0)  # the same tensors everywhere
        check(norm)
        dist.barrier()  # a process that leaves early breaks the other one's connections
    dist.destroy_process_group()
    # Past the checks, leave without the interpreter's teardown: there, one FSDP2 run in ten on torch 2.11
    # ended with "terminate called without an active exception". Where a check fails, it is not reached.
    os._exit(0)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _expected(module: nn.Module, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = module(x)
    return y, list(torch.autograd.grad(y, [x, *module.parameters()], g))


def _check_dtensor(norm: NormUnderTest) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    x, g = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    plain = norm.module(8)
    y, grads = _expected(plain, x, g)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        module = distribute_module(norm.module(8), mesh)
        dx = distribute_tensor(x, mesh, [placement]).requires_grad_()
        out = module(dx)
        if placement in (Shard(0), Shard(1)):
            assert out.placements == (placement,)  # rows stay where they are
        torch.testing.assert_close(_whole(out), y)
        out.backward(distribute_tensor(g, mesh, [placement]))
        for got, want in zip([dx.grad, *(p.grad for p in module.parameters())], grads, strict=True):
            torch.testing.assert_close(_whole(got), want)
        with torch.no_grad():
            torch.testing.assert_close(_whole(module(dx)), y)


def _check_add_dtensor(norm: NormUnderTest) -> None:
    """The fused residual add: both addends sharded alike, or brought together."""
    mesh = init_device_mesh("cpu", (WORLD,))
    add = fusednorm.AddLayerNorm if norm.has_bias else fusednorm.AddRMSNorm
    x, r, g, h = (torch.randn(4, 6, 8) for _ in range(4))
    plain, leaves = add(8, alpha=0.5), (x.requires_grad_(), r.requires_grad_())
    expected = plain(*leaves)
    for grads in ((g, h), (g, None)):
        used = [(o, t) for o, t in zip(expected, grads, strict=True) if t is not None]
        inputs = [*leaves, *plain.parameters()]
        used_outputs, used_grads = zip(*used, strict=True)
        wanted = torch.autograd.grad(used_outputs, inputs, used_grads, retain_graph=True)
        for first, second in (
            (Shard(0), Shard(0)),
            (Shard(1), Shard(1)),
            (Shard(2), Shard(0)),
            (Replicate(),) * 2,
        ):
            module = distribute_module(add(8, alpha=0.5), mesh)
            dx = distribute_tensor(x.detach(), mesh, [first]).requires_grad_()
            dr = distribute_tensor(r.detach(), mesh, [second]).requires_grad_()
            outputs = module(dx, dr)
            if first == second:
                assert all(o.placements == (first,) for o in outputs)  # rows stay where they are
            for got, want in zip(outputs, expected, strict=True):
                torch.testing.assert_close(_whole(got), want)
            sharded = [None if t is None else distribute_tensor(t, mesh, [first]) for t in grads]
            used = [(o, t) for o, t in zip(outputs, sharded, strict=True) if t is not None]
            torch.autograd.backward(*zip(*used, strict=True))
            for leaf, want in zip([dx, dr, *module.parameters()], wanted, strict=True):
                torch.testing.assert_close(_whole(leaf.grad), want)
            with torch.no_grad():
                torch.testing.assert_close(_whole(module(dx, dr)[0]), expected[0])


def _check_group_dtensor(norm: NormUnderTest) -> None:
    """Samples stay sharded; a sample that is cut is brought together. ``norm``: with a group or a channel."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x, g = torch.randn(4, 6, 8), torch.randn(4, 6, 8)

    def make() -> nn.Module:
        return fusednorm.GroupNorm(3, 6) if norm.has_bias else fusednorm.InstanceNorm(6, affine=True)

    y, grads = _expected(make(), x, g)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        module = distribute_module(make(), mesh)
        dx = distribute_tensor(x, mesh, [placement]).requires_grad_()
        out = module(dx)
        if placement == Shard(0):
            assert out.placements == (placement,)
        torch.testing.assert_close(_whole(out), y)
        out.backward(distribute_tensor(g, mesh, [placement]))
        for got, want in zip([dx.grad, *(p.grad for p in module.parameters())], grads, strict=True):
            torch.testing.assert_close(_whole(got), want)


def _check_sequence_parallel(norm: NormUnderTest) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    x, g = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    y, grads = _expected(norm.module(8), x, g)
    model = nn.Sequential(norm.module(8))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    out = model(distribute_tensor(x, mesh, [Shard(1)]))
    assert out.placements == (Shard(1),)
    out.backward(distribute_tensor(g, mesh, [Shard(1)]))
    for p, want in zip(model.parameters(), grads[1:], strict=True):
        torch.testing.assert_close(_whole(p.grad), want)


def _check_data_parallel(norm: NormUnderTest) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), norm.module(8))
    x = torch.randn(WORLD, 3, 4)
    model(x.flatten(0, 1)).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(x[dist.get_rank()]).square().mean().backward()
    for p, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want)


def _check_fsdp(norm: NormUnderTest) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), norm.module(8), nn.Linear(8, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    model(torch.randn(3, 4)).float().sum().backward()
    for p in model.parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert _whole(p.grad).isfinite().all()


CHECKS = [
    _check_dtensor,
    _check_add_dtensor,
    _check_group_dtensor,
    _check_sequence_parallel,
    _check_data_parallel,
    _check_fsdp,
]


def test_two_processes(norm: NormUnderTest) -> None:
    """All checks in one pair of processes: each new one imports torch anew, seconds of CPU time."""
    mp.spawn(_start, args=(_free_port(), CHECKS, norm.name), nprocs=WORLD, join=True)
