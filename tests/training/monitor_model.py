"""A small model for the tests of the monitor, and comparisons of what it saw."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fusednorm
from fusednorm.training import NormReport

DIM, LAYERS, BATCH = 24, 3, 6


# A sum of n fp64 numbers in blocks is off by some ulps; 1e-12 is 4500 of them.
CLOSE = {"rtol": 1e-12, "atol": 0.0}


class Block(nn.Module):
    """Pre-Norm around a linear layer; `recompute` may run it through a checkpoint."""

    recompute: Callable[..., Any] | None = None

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = norm, nn.Linear(DIM, DIM), nn.Dropout(dropout)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.recompute is None else self.recompute(self.inner, x)


def make_model(norm: Callable[..., nn.Module] = fusednorm.LayerNorm, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [Block(norm(DIM), dropout) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(DIM, DIM), *blocks, nn.Linear(DIM, 1))


def batch(seed: int, rows: int = BATCH, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, 5, DIM, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.get_default_device(), dtype)


def train(model: nn.Module, steps: int, run: Callable[..., Tensor] | None = None) -> list[float]:
    """Losses of some steps on batches that depend on the step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)  # AdamW's epsilon is 0 in fp16
    dtype = next(model.parameters()).dtype
    losses = []
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model if run is None else run)(batch(step, dtype=dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def recording(module: nn.Module) -> Iterator[list[Tensor]]:
    """All inputs of a module, copied."""
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
    yield inputs
    handle.remove()


def assert_statistics(report: NormReport, rows: Tensor) -> None:
    """``report`` is that of ``rows``, [rows, dims], where they are finite."""
    rows = rows.double().cpu()
    for dim, column in enumerate(rows.unbind(1)):
        finite = column[column.isfinite()]
        mean = finite.mean()
        assert report.rows[dim] == len(finite)
        assert report.nonfinite[dim] == len(column) - len(finite)
        if len(finite) == 0:
            assert report.mean.isnan()[dim] and report.std.isnan()[dim] and report.largest.isnan()[dim]
            continue
        assert report.largest[dim] == finite.abs().max()
        # A mean's error is relative to the largest value; a deviation's grows by mean / deviation.
        torch.testing.assert_close(report.mean[dim], mean, rtol=0, atol=1e-15 * float(report.largest[dim]))
        deviation = (finite - mean).square().mean().sqrt()
        torch.testing.assert_close(report.std[dim], deviation, **CLOSE)


def assert_same(found: NormReport, expected: NormReport) -> None:
    """Two monitors saw the same, to the bit."""
    assert found.seen and expected.seen
    for key in ("rows", "mean", "std", "largest", "nonfinite"):
        assert torch.equal(getattr(found, key), getattr(expected, key)), key
    assert str(found.series) == str(expected.series)  # as text NaN is NaN
