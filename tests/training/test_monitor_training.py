"""What the monitor must not disturb, and when it looks: training, checkpoints, compilation, copies."""

import copy
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusednorm
from fusednorm import NormMonitor
from monitor_model import (
    BATCH,
    DIM,
    Block,
    assert_same,
    assert_statistics,
    batch,
    make_model,
    recording,
    train,
)


def test_accumulated_batches_are_one_step() -> None:
    """Three forward and backward passes of a step show what one of the whole batch shows."""
    reports = []
    for parts in (1, 3):
        model = make_model().double()
        monitor = NormMonitor(model, every=2, manual_steps=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for x in batch(step, dtype=torch.float64).chunk(parts):
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


def test_backward_after_the_next_forward() -> None:
    """As with two batches through a discriminator before its loss."""
    model = make_model()
    monitor = NormMonitor(model, every=3)
    first, second = model(batch(0)), model(batch(1))
    (first.square().mean() + second.square().mean()).backward()
    alone = make_model()
    expected = NormMonitor(alone, every=3)
    alone(batch(0)).square().mean().backward()
    for found, right in zip(monitor.report(), expected.report(), strict=True):
        # The gradient at the input is the first batch's; the weight's gradient is what backward left.
        assert found.series["input_grad_norm"] == right.series["input_grad_norm"]
        assert found.last("weight_grad_norm") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [fusednorm.LayerNorm, nn.RMSNorm])
def test_training_has_the_same_bits(norm: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    runs = []
    for watched in (False, True):
        model = make_model(norm, dropout=0.2).to(dtype)
        monitor = NormMonitor(model, every=2) if watched else None
        runs.append((train(model, 6), [p.detach().clone() for p in model.parameters()]))
        assert monitor is None or monitor.report()[0].series["step"] == [0, 2, 4]
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_autocast_has_the_same_bits() -> None:
    losses, reports = [], []
    for watched in (False, True):
        model = make_model(nn.LayerNorm)
        monitor = NormMonitor(model, every=1) if watched else None
        with torch.autocast("cpu", torch.bfloat16), recording(model[1].norm) as inputs:
            losses.append(train(model, 3))
        if monitor is not None:
            assert_statistics(monitor.report()[0], torch.cat(inputs).flatten(0, -2))
            reports = monitor.report()
    assert losses[0] == losses[1] and reports[0].last("weight_grad_norm") > 0


def test_nothing_of_a_step_is_kept_alive() -> None:
    model = make_model()
    monitor = NormMonitor(model, every=1)
    inputs: list[weakref.ref[Tensor]] = []
    model[2].norm.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(batch(0)).square().mean()
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
        model = make_model()
        monitor = NormMonitor(model, every=2)
        runs.append((train(model, 3), monitor.report(), monitor.steps))
    (losses, plain, steps), (other_losses, repeated, other_steps) = runs
    assert losses == other_losses and steps == other_steps == 3
    for found, expected in zip(repeated, plain, strict=True):
        assert expected.last("input_grad_norm") > 0
        assert_same(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_the_model_counts_once(use_reentrant: bool) -> None:
    """Inside a larger module: that one has the forward pass."""
    inner = make_model()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=use_reentrant)
            return y

    outer = Outer()
    monitors = NormMonitor(outer, every=2), NormMonitor(inner, every=2)
    train(outer, 3)
    assert monitors[0].steps == 3 and monitors[0].report()[0].rows[0] == 2 * BATCH * 5
    # A reentrant checkpoint's first pass has no gradients, and looks like an evaluation from inside.
    assert monitors[1].steps == (0 if use_reentrant else 3)
    if not use_reentrant:
        assert_same(monitors[1].report()[0], monitors[0].report()[0])


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
    plain = make_model()
    expected = NormMonitor(plain, every=3)
    losses = train(plain, 6)
    torch._dynamo.reset()
    model = make_model()
    model = model if shape is nn.Sequential else shape(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    monitor = NormMonitor(compiled if outside else model, every=3)
    assert train(model, 6, compiled) == losses
    assert monitor.steps == 6
    for found, right in zip(monitor.report(), expected.report(), strict=True):
        assert_same(found, right)
    monitor.remove()
    before = monitor.report()
    compiled(batch(0)).mean().backward()
    assert_same(monitor.report()[0], before[0])
    assert monitor.steps == 6


def test_a_whole_graph_is_refused_by_torch() -> None:
    torch._dynamo.reset()
    model = make_model()
    NormMonitor(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="torch.compiler.disable"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch(0))


def test_only_training_is_observed() -> None:
    model = make_model()
    monitor = NormMonitor(model, every=1)
    with torch.no_grad():
        model(batch(0))
    with torch.inference_mode():
        model(batch(0))
    model.eval()
    model(batch(0)).mean().backward()
    model.train()
    model[1](batch(0))  # a part of the model, called by itself
    assert monitor.steps == 0 and not any(report.seen for report in monitor.report())
    assert "did not run" in monitor.table() and "0 of 0 steps" in monitor.table()
    model[1].eval()  # frozen inside a model that trains: still the training's input
    model(batch(0))
    assert monitor.steps == 1 and all(report.seen for report in monitor.report())


def test_a_model_that_is_a_norm() -> None:
    norm = nn.LayerNorm(DIM)
    monitor = NormMonitor(norm, every=2)
    for step in range(5):
        norm(batch(step))
    assert monitor.report()[0].series["step"] == [0, 2, 4]


def test_norms_have_hooks_in_observed_steps_alone() -> None:
    """What fuses a norm with its neighbours asks for hooks."""
    model, hooks = make_model(), []
    NormMonitor(model, every=3)
    model[2].register_forward_hook(lambda module, *_: hooks.append(len(module.norm._forward_hooks)))
    train(model, 7)
    assert hooks == [1, 0, 0, 1, 0, 0, 1]


def test_evaluation_between_forward_and_backward() -> None:
    model = make_model()
    monitor = NormMonitor(model, every=1)
    loss = model(batch(0)).square().mean()
    with torch.no_grad():
        model(batch(1))
    loss.backward()
    assert monitor.report()[0].rows[0] == BATCH * 5 and monitor.report()[0].last("input_grad_norm") > 0


def test_a_failing_forward_leaves_no_state() -> None:
    model = make_model()
    monitor = NormMonitor(model, every=1)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, DIM + 1))
    model[1](batch(0))
    assert not any(report.seen for report in monitor.report())


def test_weights_that_become_trainable_late() -> None:
    model = make_model()
    model[1].norm.weight.requires_grad_(False)
    monitor = NormMonitor(model, every=1)
    model(batch(0)).mean().backward()
    model[1].norm.weight.requires_grad_()
    model(batch(1)).square().mean().backward()
    series = monitor.report()[0].series["weight_grad_norm"]
    assert math.isnan(series[0]) and series[1] == pytest.approx(
        float(model[1].norm.weight.grad.double().norm())
    )


def test_weights_that_are_computed_or_replaced() -> None:
    model = make_model()
    for block in model[1:-1]:
        nn.utils.parametrize.register_parametrization(block.norm, "weight", nn.Tanh())
    monitor = NormMonitor(model, every=1)
    train(model, 2)
    assert monitor.report()[0].last("weight_norm") == pytest.approx(math.sqrt(DIM) * math.tanh(1), rel=1e-2)
    assert math.isnan(monitor.report()[0].last("weight_grad_norm"))
    model, old = make_model(), fusednorm.RMSNorm(DIM).weight
    model[1].norm.weight = old
    monitor = NormMonitor(model, every=1)
    train(model, 1)
    model[1].norm.weight = nn.Parameter(torch.full((DIM,), 2.0))
    train(model, 1)
    assert not old._post_accumulate_grad_hooks
    report = monitor.report()[0]
    grad = float(model[1].norm.weight.grad.double().norm())
    assert report.last("weight_grad_norm") == pytest.approx(grad, rel=1e-14)


class Writer:
    """Cannot be copied: nor is a monitor that has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        pass


def test_copies_are_not_watched(tmp_path: Path) -> None:
    model = make_model()
    plain = list(model.state_dict())
    monitor = NormMonitor(model, every=1, writer=Writer())
    assert list(model.state_dict()) == plain
    train(model, 1)
    before = monitor.report()
    torch.save(model, tmp_path / "model.pt")
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    twins.append(torch.load(io.BytesIO((tmp_path / "model.pt").read_bytes()), weights_only=False))
    for twin in twins:
        assert torch.equal(twin(batch(1)), model.eval()(batch(1)))
        twin(batch(1)).mean().backward()
    assert monitor.steps == 1
    assert_same(monitor.report()[0], before[0])


def test_removal() -> None:
    model = make_model()
    weights = [block.norm.weight for block in model[1:-1]]
    with NormMonitor(model, every=1) as monitor:
        train(model, 2)
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_with_kwargs for m in modules)
    assert not any(w._post_accumulate_grad_hooks for w in weights)
    before = monitor.report()
    train(model, 2)
    monitor.remove()
    assert monitor.steps == 2
    assert_same(monitor.report()[0], before[0])
