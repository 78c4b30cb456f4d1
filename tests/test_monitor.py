"""The monitor against float64 computations over all that norms were given; what it must not disturb."""

import copy
import gc
import io
import json
import math
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusednorm
from fusednorm import NormMonitor, monitor_statistics
from fusednorm.monitor_report import NormReport

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


def _model(norm: Callable[..., nn.Module] = fusednorm.LayerNorm, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [Block(norm(DIM), dropout) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(DIM, DIM), *blocks, nn.Linear(DIM, 1))


def _batch(seed: int, rows: int = BATCH, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, 5, DIM, generator=torch.Generator().manual_seed(seed))
    return x.to(torch.get_default_device(), dtype)


def _train(model: nn.Module, steps: int, run: Callable[..., Tensor] | None = None) -> list[float]:
    """Losses of some steps on batches that depend on the step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)  # AdamW's epsilon is 0 in fp16
    dtype = next(model.parameters()).dtype
    losses = []
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model if run is None else run)(_batch(step, dtype=dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def _recording(module: nn.Module) -> Iterator[list[Tensor]]:
    """All inputs of a module, copied."""
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
    yield inputs
    handle.remove()


def _assert_statistics(report: NormReport, rows: Tensor) -> None:
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


def _assert_same(found: NormReport, expected: NormReport) -> None:
    """Two monitors saw the same, to the bit."""
    assert found.seen and expected.seen
    for key in ("rows", "mean", "std", "largest", "nonfinite"):
        assert torch.equal(getattr(found, key), getattr(expected, key)), key
    assert str(found.series) == str(expected.series)  # as text NaN is NaN


SECOND: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 7)),
    (lambda: nn.BatchNorm1d(4), (9, 4)),
    (lambda: nn.BatchNorm1d(4), (3, 4, 4)),
    (lambda: nn.BatchNorm2d(4), (3, 4, 4, 4)),
    (lambda: nn.LazyBatchNorm1d(), (3, 4, 5)),
    (lambda: nn.InstanceNorm1d(4), (3, 4, 5)),
    (lambda: nn.InstanceNorm2d(4), (3, 4, 5, 2)),
    (lambda: nn.LocalResponseNorm(2), (3, 4, 5)),
]


@pytest.mark.parametrize(("make", "shape"), SECOND)
def test_channels_second(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    norm = make()
    monitor = NormMonitor(norm, every=1)
    inputs = [torch.randn(shape) * (k + 1) + k for k in range(3)]
    for x in inputs:
        norm(x)
    (report,) = monitor.report()
    _assert_statistics(report, torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], 1).T)
    assert report.kind == type(norm).__name__


def test_instance_norm_without_a_batch() -> None:
    norm = nn.InstanceNorm1d(4)
    monitor = NormMonitor(norm, every=1)
    x = torch.randn(4, 6)
    norm(x)
    _assert_statistics(monitor.report()[0], x.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [fusednorm.LayerNorm, fusednorm.RMSNorm, nn.LayerNorm, nn.RMSNorm])
def test_statistics_over_all_steps(norm: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    model = _model(norm).to(dtype)
    monitor = NormMonitor(model, every=2)
    with _recording(model[2].norm) as inputs:
        _train(model, 5)
    assert [report.name for report in monitor.report()] == ["1.norm", "2.norm", "3.norm"]
    report = monitor.report()[1]
    assert report.series["step"] == [0, 2, 4] and monitor.steps == 5
    seen = [x.flatten(0, -2) for x in inputs[::2]]
    _assert_statistics(report, torch.cat(seen))
    assert report.series["largest"] == [float(x.abs().max()) for x in seen]


def test_several_dimensions_and_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of a row or two; about a mean of 1e6 a one-pass variance would have no digit right."""
    monkeypatch.setattr(monitor_statistics, "_CHUNK", 25)
    norm = nn.LayerNorm((3, 4), dtype=torch.float64)
    monitor = NormMonitor(norm, every=1)
    inputs = [1e-3 * torch.randn(7, 2, 3, 4, dtype=torch.float64) + 1e6 for _ in range(4)]
    for x in inputs:
        norm(x)
    report = monitor.report()[0]
    rows = torch.cat(inputs).reshape(-1, 12)
    # A mean's last bit, 2**-53 of 1e6, is 1.1e-7 of a deviation of 1e-3.
    torch.testing.assert_close(report.std, (rows - 1e6).std(0, correction=0), rtol=1.1e-7, atol=0)
    torch.testing.assert_close(report.mean, rows.mean(0), rtol=1e-15, atol=0)


def test_strided_and_empty_input() -> None:
    norm = fusednorm.RMSNorm(8)
    monitor = NormMonitor(norm, every=1)
    packed = torch.randn(2, 3, 3, 4, 8)
    q = packed[:, :, 1].transpose(1, 2)  # a head of a packed qkv
    norm(q)
    norm(torch.empty(0, 8))
    report = monitor.report()[0]
    _assert_statistics(report, q.reshape(-1, 8))
    assert report.series["step"] == [0, 1] and math.isnan(report.series["largest"][1])


def test_gradients_and_weights() -> None:
    model = _model().double()
    monitor = NormMonitor(model, every=3)
    expected: dict[str, list[float]] = {"weight_norm": [], "weight_grad_norm": [], "input_grad_norm": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        seen: list[Tensor] = []
        handle = model[2].norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        optimizer.zero_grad()
        loss = model(_batch(step, dtype=torch.float64)).square().mean()
        handle.remove()
        (grad,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
        if step % 3 == 0:
            # The gradient just taken passed by the norms behind this one, not by this one's hook's input...
            expected["weight_norm"].append(float(model[2].norm.weight.detach().norm()))
            expected["input_grad_norm"].append(float(grad.norm()))
        loss.backward()
        if step % 3 == 0:
            expected["weight_grad_norm"].append(float(model[2].norm.weight.grad.norm()))
        optimizer.step()
    report = monitor.report()[1]
    for key, values in expected.items():
        if key == "input_grad_norm":  # ...which it did: two backward passes add up, as squares
            values = [value * math.sqrt(2) for value in values]
        assert report.series[key] == pytest.approx(values, rel=1e-14), key
    assert report.last("input_grad_norm") > 0


def test_accumulated_batches_are_one_step() -> None:
    """Three forward and backward passes of a step show what one of the whole batch shows."""
    reports = []
    for parts in (1, 3):
        model = _model().double()
        monitor = NormMonitor(model, every=2, manual_steps=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for x in _batch(step, dtype=torch.float64).chunk(parts):
                (model(x).square().mean() / parts).backward()
            optimizer.step()
            monitor.step()
        assert monitor.steps == 5
        reports.append(monitor.report())
    for whole, accumulated in zip(*reports, strict=True):
        assert accumulated.series["step"] == [0, 2]
        for key in ("rows", "mean", "std", "largest"):  # the training's own sums differ in their last bits
            torch.testing.assert_close(getattr(accumulated, key), getattr(whole, key), rtol=1e-12, atol=1e-14)
        for key, values in whole.series.items():
            assert accumulated.series[key] == pytest.approx(values, rel=1e-12), key


def test_a_norm_that_runs_twice_in_a_step() -> None:
    model = _model()
    model[2].norm = model[1].norm
    monitor = NormMonitor(model, every=1)
    with _recording(model[1].norm) as inputs:
        _train(model, 1)
    assert len(inputs) == 2 and [r.name for r in monitor.report()] == ["1.norm", "3.norm"]
    _assert_statistics(monitor.report()[0], torch.cat(inputs).flatten(0, -2))


def test_backward_after_the_next_forward() -> None:
    """As with two batches through a discriminator before its loss."""
    model = _model()
    monitor = NormMonitor(model, every=3)
    first, second = model(_batch(0)), model(_batch(1))
    (first.square().mean() + second.square().mean()).backward()
    alone = _model()
    expected = NormMonitor(alone, every=3)
    alone(_batch(0)).square().mean().backward()
    for found, right in zip(monitor.report(), expected.report(), strict=True):
        # The gradient at the input is the first batch's; the weight's gradient is what backward left.
        assert found.series["input_grad_norm"] == right.series["input_grad_norm"]
        assert found.last("weight_grad_norm") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [fusednorm.LayerNorm, nn.RMSNorm])
def test_training_has_the_same_bits(norm: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    runs = []
    for watched in (False, True):
        model = _model(norm, dropout=0.2).to(dtype)
        monitor = NormMonitor(model, every=2) if watched else None
        runs.append((_train(model, 6), [p.detach().clone() for p in model.parameters()]))
        assert monitor is None or monitor.report()[0].series["step"] == [0, 2, 4]
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_autocast_has_the_same_bits() -> None:
    losses, reports = [], []
    for watched in (False, True):
        model = _model(nn.LayerNorm)
        monitor = NormMonitor(model, every=1) if watched else None
        with torch.autocast("cpu", torch.bfloat16), _recording(model[1].norm) as inputs:
            losses.append(_train(model, 3))
        if monitor is not None:
            _assert_statistics(monitor.report()[0], torch.cat(inputs).flatten(0, -2))
            reports = monitor.report()
    assert losses[0] == losses[1] and reports[0].last("weight_grad_norm") > 0


def test_nothing_of_a_step_is_kept_alive() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    inputs: list[weakref.ref[Tensor]] = []
    model[2].norm.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(_batch(0)).square().mean()
    loss.backward()
    del loss
    gc.collect()
    assert inputs[0]() is None  # the graph had it
    for watched in monitor._watched:
        assert watched.sample is not None
        kept = [v for v in vars(watched.sample).values() if isinstance(v, Tensor)]
        assert kept and not any(v.requires_grad or v.grad_fn is not None or v.dim() for v in kept)


def _selective() -> Any:
    # Keeps every output: an operator that ran in the first pass alone would shift all that come after it.
    return create_selective_checkpoint_contexts(lambda *_: CheckpointPolicy.MUST_SAVE)


RECOMPUTE = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "selective": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=_selective),
}


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_checkpointing_counts_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for recompute in (None, RECOMPUTE[kind]):
        monkeypatch.setattr(Block, "recompute", staticmethod(recompute) if recompute else None)
        model = _model()
        monitor = NormMonitor(model, every=2)
        runs.append((_train(model, 3), monitor.report(), monitor.steps))
    (losses, plain, steps), (other_losses, repeated, other_steps) = runs
    assert losses == other_losses and steps == other_steps == 3
    for found, expected in zip(repeated, plain, strict=True):
        assert expected.last("input_grad_norm") > 0
        _assert_same(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_model_counts_once(use_reentrant: bool) -> None:
    """Inside a larger module: that one has the forward pass."""
    inner = _model()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=use_reentrant)
            return y

    outer = Outer()
    monitors = NormMonitor(outer, every=2), NormMonitor(inner, every=2)
    _train(outer, 3)
    assert monitors[0].steps == 3 and monitors[0].report()[0].rows[0] == 2 * BATCH * 5
    # A reentrant checkpoint's first pass has no gradients, and looks like an evaluation from inside.
    assert monitors[1].steps == (0 if use_reentrant else 3)
    if not use_reentrant:
        _assert_same(monitors[1].report()[0], monitors[0].report()[0])


class Straight(nn.Module):
    """The same without a loop: torch breaks the graph at each norm, where it gives a loop up as a whole."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.e(self.d(self.c(self.b(self.a(x)))))
        return y


@pytest.mark.parametrize("shape", [nn.Sequential, Straight])
@pytest.mark.parametrize("outside", [False, True], ids=["the model", "the compiled model"])
def test_compiled_models(outside: bool, shape: Callable[..., nn.Module]) -> None:
    plain = _model()
    expected = NormMonitor(plain, every=3)
    losses = _train(plain, 6)
    torch._dynamo.reset()
    model = _model()
    model = model if shape is nn.Sequential else shape(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    monitor = NormMonitor(compiled if outside else model, every=3)
    assert _train(model, 6, compiled) == losses
    assert monitor.steps == 6
    for found, right in zip(monitor.report(), expected.report(), strict=True):
        _assert_same(found, right)
    monitor.remove()
    before = monitor.report()
    compiled(_batch(0)).mean().backward()
    _assert_same(monitor.report()[0], before[0])
    assert monitor.steps == 6


def test_a_whole_graph_is_refused_by_torch() -> None:
    torch._dynamo.reset()
    model = _model()
    NormMonitor(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(_batch(0))


def test_only_training_is_observed() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    with torch.no_grad():
        model(_batch(0))
    with torch.inference_mode():
        model(_batch(0))
    model.eval()
    model(_batch(0)).mean().backward()
    model.train()
    model[1](_batch(0))  # a part of the model, called by itself
    assert monitor.steps == 0 and not any(report.seen for report in monitor.report())
    assert "did not run" in monitor.table() and "0 of 0 steps" in monitor.table()
    model[1].eval()  # frozen inside a model that trains: still the training's input
    model(_batch(0))
    assert monitor.steps == 1 and all(report.seen for report in monitor.report())


def test_a_model_that_is_a_norm() -> None:
    norm = nn.LayerNorm(DIM)
    monitor = NormMonitor(norm, every=2)
    for step in range(5):
        norm(_batch(step))
    assert monitor.report()[0].series["step"] == [0, 2, 4]


def test_norms_have_hooks_in_observed_steps_alone() -> None:
    """What fuses a norm with its neighbours asks for hooks."""
    model, hooks = _model(), []
    NormMonitor(model, every=3)
    model[2].register_forward_hook(lambda module, *_: hooks.append(len(module.norm._forward_hooks)))
    _train(model, 7)
    assert hooks == [1, 0, 0, 1, 0, 0, 1]


def test_evaluation_between_forward_and_backward() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    loss = model(_batch(0)).square().mean()
    with torch.no_grad():
        model(_batch(1))
    loss.backward()
    assert monitor.report()[0].rows[0] == BATCH * 5 and monitor.report()[0].last("input_grad_norm") > 0


def test_a_failing_forward_leaves_no_state() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, DIM + 1))
    model[1](_batch(0))
    assert not any(report.seen for report in monitor.report())


def test_non_finite_values_are_counted_and_left_out() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    poison = {2: (1, math.nan), 3: (2, math.inf)}  # step: block, value

    def spoil(module: Block, args: Any) -> Any:
        block, value = poison.get(monitor.steps - 1, (0, 0.0))
        if model[block] is module:
            x = args[0].clone()
            x[0, :2, 7] = value
            return (x,)

    for block in model[1:-1]:
        block.register_forward_pre_hook(spoil)
    recorded = [_recording(block.norm) for block in model[1:-1]]
    inputs = [record.__enter__() for record in recorded]
    for step in range(4):
        model(_batch(step)).square().mean()
    for report, seen in zip(monitor.report(), inputs, strict=True):
        _assert_statistics(report, torch.cat(seen).flatten(0, -2))
    first, second, third = monitor.report()
    assert first.series["nonfinite_input"] == [0, 0, 2, 0] and first.nonfinite[7] == 2
    assert [r.first_nonfinite("input") for r in (first, second, third)] == [2, 2, 2]
    assert "NaN or infinity first seen in the input of 1.norm, at step 2" in monitor.table()


def test_a_dimension_without_any_finite_value() -> None:
    norm = fusednorm.LayerNorm(4)
    monitor = NormMonitor(norm, every=1)
    x = torch.randn(3, 4)
    x[:, 1] = math.nan
    norm(x)
    report = monitor.report()[0]
    assert report.rows.tolist() == [3, 0, 3, 3] and report.nonfinite.tolist() == [0, 3, 0, 0]
    assert report.std.isnan().tolist() == report.mean.isnan().tolist() == [False, True, False, False]
    assert report.largest.isnan()[1] and report.outliers == []


def test_non_finite_gradients() -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    for step in range(3):
        scale = math.inf if step == 1 else 1.0
        (model(_batch(step)).square().mean() * scale).backward()
    for report in monitor.report():
        assert report.first_nonfinite("grad") == 1 and report.first_nonfinite("input") is None
        assert report.series["nonfinite_grad"] == [0, BATCH * 5 * DIM, 0]
        assert not math.isfinite(report.series["input_grad_norm"][1])
    assert (
        "first seen in the input's gradient of 3.norm, at step 1" in monitor.table()
    )  # it comes from behind


def test_outlier_dimensions() -> None:
    scales = torch.ones(11)
    scales[2], scales[5], scales[8] = 40.0, 0.02, 0.0
    norm = fusednorm.RMSNorm(11)
    x = torch.randn(4000, 11) * scales
    with NormMonitor(norm, every=1) as monitor:
        norm(x)
    report = monitor.report()[0]
    assert [o.dim for o in report.outliers] == [2, 5, 8]
    median = x.double().std(0, correction=0).median()
    for outlier in report.outliers:
        assert outlier.std == pytest.approx(float(x[:, outlier.dim].double().std(correction=0)), rel=1e-12)
        assert outlier.ratio == pytest.approx(float(outlier.std / median), rel=1e-12)
    assert "outlier dimensions of RMSNorm: 2 (" in monitor.table() and "8 (0x)" in monitor.table()
    with NormMonitor(norm, every=1, outlier_ratio=45.0) as monitor:
        norm(x)
    assert [o.dim for o in monitor.report()[0].outliers] == [5, 8]


def test_outliers_beside_constants() -> None:
    """A median of 0: what varies at all stands out."""
    norm = fusednorm.RMSNorm(5)
    x = torch.ones(10, 5)
    x[:, 3] = torch.randn(10)
    with NormMonitor(norm, every=1) as monitor:
        norm(x)
    (outlier,) = monitor.report()[0].outliers
    assert outlier.dim == 3 and outlier.ratio == math.inf


def _ours(cls: type[nn.Module]) -> type[nn.Module]:
    """As if a class came with the package."""
    cls.__module__ = "fusednorm.test"
    return cls


def test_norms_of_this_package_by_name() -> None:
    """Columns last, a padding mask, the sum of an Add*Norm, a norm inside a norm: by this package's names."""

    @_ours
    class BatchNorm(nn.BatchNorm1d):
        def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(input.transpose(1, 2)).transpose(1, 2)

    @_ours
    class AddLayerNorm(nn.LayerNorm):
        def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            total = input + 0.5 * residual
            return super().forward(total), total

    @_ours
    class AdaptiveNorm(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, input: Tensor) -> Tensor:
            y: Tensor = self.norm(input)
            return y

    @_ours
    class GroupNorm(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return F.group_norm(input, 2)

    @_ours
    class ScaleNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.tensor(3.0))

        def forward(self, input: Tensor) -> Tensor:
            return self.g * F.normalize(input, dim=-1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns, self.scale, self.group = BatchNorm(4), ScaleNorm(), GroupNorm()
            self.adaptive, self.add = AdaptiveNorm(nn.LayerNorm(4)), AddLayerNorm(4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.adaptive(self.group(self.scale(self.columns(self.columns(x), mask=mask))))
            y, self.total = self.add(h, x)
            return y.sin() + self.total

    model, x = Model(), torch.randn(4, 6, 4)
    monitor = NormMonitor(model, every=1)
    mask = torch.rand(4, 6) < 0.6
    with _recording(model.columns) as inputs, _recording(model.group) as grouped:
        y = model(x, mask)
    model.total.retain_grad()
    y.square().sum().backward()
    columns, scale, group, adaptive, add = monitor.report()
    assert [r.name for r in monitor.report()] == ["columns", "scale", "group", "adaptive", "add"]
    _assert_statistics(columns, torch.cat([inputs[0].flatten(0, 1), inputs[1][mask]]))
    _assert_statistics(group, grouped[0].transpose(1, 2).flatten(0, 1))
    assert scale.last("weight_norm") == 3 and scale.last("weight_grad_norm") > 0
    assert adaptive.seen and math.isnan(adaptive.last("weight_norm"))
    _assert_statistics(add, model.total.detach().flatten(0, 1))


def test_the_gradient_of_an_added_sum() -> None:
    """That of the sum as a whole: by way of the norm and by way of the stream."""

    @_ours
    class AddNorm(nn.Module):
        def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = input + residual
            return F.layer_norm(total, (DIM,)), total

    add = AddNorm()
    monitor = NormMonitor(add, every=1)
    x = _batch(0).double().requires_grad_()
    y, total = add(x.sin(), _batch(1).double())
    (y.cos().sum() + total.square().sum()).backward()
    leaf = (x.detach().sin() + _batch(1)).requires_grad_()
    (F.layer_norm(leaf, (DIM,)).cos().sum() + leaf.square().sum()).backward()
    assert leaf.grad is not None
    # A sum of 720 squares, and the norm's own rounding.
    assert monitor.report()[0].last("input_grad_norm") == pytest.approx(float(leaf.grad.norm()), rel=1e-12)


def test_own_classes() -> None:
    model = _model(lambda dim: nn.Tanh())
    with pytest.raises(
        ValueError, match="NormMonitor: model: expected a model with a norm .* got Sequential"
    ):
        NormMonitor(model)
    monitor = NormMonitor(model, every=1, also=(Block, nn.Tanh))
    with _recording(model[3]) as inputs:
        _train(model, 1)
    names = [report.name for report in monitor.report()]
    assert sorted(names) == ["1", "1.norm", "2", "2.norm", "3", "3.norm"]
    _assert_statistics(monitor.report()[names.index("3")], inputs[0].flatten(0, 1))


def test_weights_that_become_trainable_late() -> None:
    model = _model()
    model[1].norm.weight.requires_grad_(False)
    monitor = NormMonitor(model, every=1)
    model(_batch(0)).mean().backward()
    model[1].norm.weight.requires_grad_()
    model(_batch(1)).square().mean().backward()
    series = monitor.report()[0].series["weight_grad_norm"]
    assert math.isnan(series[0]) and series[1] == pytest.approx(
        float(model[1].norm.weight.grad.double().norm())
    )


def test_weights_that_are_computed_or_replaced() -> None:
    model = _model()
    for block in model[1:-1]:
        nn.utils.parametrize.register_parametrization(block.norm, "weight", nn.Tanh())
    monitor = NormMonitor(model, every=1)
    _train(model, 2)
    assert monitor.report()[0].last("weight_norm") == pytest.approx(math.sqrt(DIM) * math.tanh(1), rel=1e-2)
    assert math.isnan(monitor.report()[0].last("weight_grad_norm"))
    model, old = _model(), fusednorm.RMSNorm(DIM).weight
    model[1].norm.weight = old
    monitor = NormMonitor(model, every=1)
    _train(model, 1)
    model[1].norm.weight = nn.Parameter(torch.full((DIM,), 2.0))
    _train(model, 1)
    assert not old._post_accumulate_grad_hooks
    report = monitor.report()[0]
    grad = float(model[1].norm.weight.grad.double().norm())
    assert report.last("weight_grad_norm") == pytest.approx(grad, rel=1e-14)


def test_an_input_that_changes_its_width() -> None:
    model = nn.Sequential(nn.Identity())
    NormMonitor(model, every=1, also=(nn.Identity,))
    model(torch.ones(2, 3))
    message = "NormMonitor: 0: expected an input with 3 features, as before, got 4"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 4))


def test_copies_are_not_watched(tmp_path: Path) -> None:
    model = _model()
    plain = list(model.state_dict())
    writer = _Writer()
    writer.lock = threading.Lock()  # cannot be copied: nor is the monitor
    monitor = NormMonitor(model, every=1, writer=writer)
    assert list(model.state_dict()) == plain
    _train(model, 1)
    before = monitor.report()
    torch.save(model, tmp_path / "model.pt")
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    twins.append(torch.load(io.BytesIO((tmp_path / "model.pt").read_bytes()), weights_only=False))
    for twin in twins:
        assert torch.equal(twin(_batch(1)), model.eval()(_batch(1)))
        twin(_batch(1)).mean().backward()
    assert monitor.steps == 1
    _assert_same(monitor.report()[0], before[0])


def test_removal() -> None:
    model = _model()
    weights = [block.norm.weight for block in model[1:-1]]
    with NormMonitor(model, every=1) as monitor:
        _train(model, 2)
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_with_kwargs for m in modules)
    assert not any(w._post_accumulate_grad_hooks for w in weights)
    before = monitor.report()
    _train(model, 2)
    monitor.remove()
    assert monitor.steps == 2
    _assert_same(monitor.report()[0], before[0])


class _Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, (int, float)) and not math.isnan(value) and isinstance(step, int)
        self.scalars.setdefault(tag, {})[step] = value


def test_scalars() -> None:
    writer, model = _Writer(), _model()
    model[2].norm.weight = None
    with _recording(model[1].norm) as inputs, NormMonitor(model, every=2, writer=writer) as monitor:
        _train(model, 3)
        assert list(writer.scalars["norms/1.norm/weight_norm"]) == [0]  # step 2 is not over
    series = monitor.report()[0].series
    for key in ("largest", "weight_norm", "weight_grad_norm", "input_grad_norm", "nonfinite_input"):
        assert writer.scalars[f"norms/1.norm/{key}"] == dict(zip([0, 2], series[key], strict=True))
    own = inputs[2].double().flatten(0, -2).std(0, correction=0).median()  # that step's alone
    assert writer.scalars["norms/1.norm/median_std"][2] == pytest.approx(float(own), rel=1e-12)
    assert writer.scalars["norms/1.norm/outliers"] == {0: 0, 2: 0}
    assert "norms/2.norm/largest" in writer.scalars and "norms/2.norm/weight_norm" not in writer.scalars


def test_table_json_and_picture(tmp_path: Path) -> None:
    model = _model(fusednorm.RMSNorm)
    model.append(nn.ModuleList([nn.LayerNorm(3)]).requires_grad_(False))
    model[-1].forward = lambda x: x  # its norm never runs
    monitor = NormMonitor(model, every=2)
    with pytest.raises(RuntimeError, match=r"NormMonitor.plot: no step was observed"):
        monitor.plot(tmp_path / "none.png")
    _train(model, 3)
    model(_batch(0) * math.inf)  # step 3 is not observed
    lines = monitor.table().splitlines()
    assert lines[0].split("  ")[0] == "norm" and "2 of 4 steps observed (every 2)" in monitor.table()
    assert len(lines) == 6 and lines[4].startswith("5.0     LayerNorm  did not run in an observed step")
    cells = lines[1].split()
    report = monitor.report()[0]
    assert cells[:3] == ["1.norm", "RMSNorm", str(DIM)] and cells[-1] == "0"
    assert float(cells[3]) == pytest.approx(float(report.std.median()), rel=5e-3)  # three digits
    assert float(cells[-2]) == pytest.approx(report.last("input_grad_norm"), rel=5e-3)

    monitor.to_json(tmp_path / "norms.json")
    content = json.loads((tmp_path / "norms.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (content["steps"], content["every"]) == (4, 2) and len(content["norms"]) == 4
    entry = content["norms"][0]
    assert entry["std"] == report.std.tolist() and entry["rows"] == [2 * BATCH * 5] * DIM
    assert entry["series"]["step"] == [0, 2] and entry["first_nonfinite_input"] is None
    assert content["first_nonfinite"] == {"input": None, "grad": None}
    monitor.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_wild_values(tmp_path: Path) -> None:
    """Norms of different widths; constant, NaN and missing values."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2), nn.LayerNorm(2))
    monitor = NormMonitor(model, every=1)
    model(torch.tensor([[math.nan, 1.0, 2.0, 3.0]]))
    monitor.plot(tmp_path / "norms.png")
    monitor.to_json(tmp_path / "norms.json")
    content = json.loads((tmp_path / "norms.json").read_text())
    assert content["first_nonfinite"]["input"] == {"step": 0, "norm": "0"}
    assert content["norms"][0]["mean"] == [None, 1, 2, 3] and content["norms"][1]["rows"] == [0, 0]


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    monitor = NormMonitor(model, every=1)
    _train(model, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="NormMonitor.plot: needs matplotlib.*pip install matplotlib"):
        monitor.plot(tmp_path / "norms.png")


@pytest.mark.parametrize(
    ("kw", "error", "message"),
    [
        ({"every": 0}, ValueError, "every: expected a whole number of 1 or more, got 0"),
        ({"every": 2.0}, ValueError, "every: expected a whole number of 1 or more, got 2.0"),
        ({"every": True}, ValueError, "every: expected a whole number of 1 or more, got True"),
        ({"outlier_ratio": 1.0}, ValueError, "outlier_ratio: expected a finite number above 1, got 1.0"),
        ({"outlier_ratio": math.nan}, ValueError, "outlier_ratio: expected a finite number above 1, got nan"),
        ({"writer": object()}, TypeError, "writer: expected an object with add_scalar, got object"),
        ({"model": 3}, TypeError, "model: expected a torch.nn.Module, got int"),
    ],
)
def test_bad_arguments(kw: dict[str, Any], error: type[Exception], message: str) -> None:
    model = _model()
    with pytest.raises(error, match=f"fusednorm.NormMonitor: {message}"):
        NormMonitor(**{"model": model, **kw})
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="NormMonitor.step: expected manual_steps=True, got False"):
        NormMonitor(model).step()
