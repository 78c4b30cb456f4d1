"""The monitor against float64 computations over all that norms were given."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm
from fusednorm import NormMonitor
from fusednorm.training import statistics as monitor_statistics
from monitor_model import (
    BATCH,
    DIM,
    Block,
    assert_statistics,
    batch,
    make_model,
    recording,
    train,
)

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
    assert_statistics(report, torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], 1).T)
    assert report.kind == type(norm).__name__


def test_instance_norm_without_a_batch() -> None:
    norm = nn.InstanceNorm1d(4)
    monitor = NormMonitor(norm, every=1)
    x = torch.randn(4, 6)
    norm(x)
    assert_statistics(monitor.report()[0], x.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [fusednorm.LayerNorm, fusednorm.RMSNorm, nn.LayerNorm, nn.RMSNorm])
def test_statistics_over_all_steps(norm: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    model = make_model(norm).to(dtype)
    monitor = NormMonitor(model, every=2)
    with recording(model[2].norm) as inputs:
        train(model, 5)
    assert [report.name for report in monitor.report()] == ["1.norm", "2.norm", "3.norm"]
    report = monitor.report()[1]
    assert report.series["step"] == [0, 2, 4] and monitor.steps == 5
    seen = [x.flatten(0, -2) for x in inputs[::2]]
    assert_statistics(report, torch.cat(seen))
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
    assert_statistics(report, q.reshape(-1, 8))
    assert report.series["step"] == [0, 1] and math.isnan(report.series["largest"][1])


def test_gradients_and_weights() -> None:
    model = make_model().double()
    monitor = NormMonitor(model, every=3)
    expected: dict[str, list[float]] = {"weight_norm": [], "weight_grad_norm": [], "input_grad_norm": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        seen: list[Tensor] = []
        handle = model[2].norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        optimizer.zero_grad()
        loss = model(batch(step, dtype=torch.float64)).square().mean()
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


def test_a_norm_that_runs_twice_in_a_step() -> None:
    model = make_model()
    model[2].norm = model[1].norm
    monitor = NormMonitor(model, every=1)
    with recording(model[1].norm) as inputs:
        train(model, 1)
    assert len(inputs) == 2 and [r.name for r in monitor.report()] == ["1.norm", "3.norm"]
    assert_statistics(monitor.report()[0], torch.cat(inputs).flatten(0, -2))


def test_non_finite_values_are_counted_and_left_out() -> None:
    model = make_model()
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
    recorded = [recording(block.norm) for block in model[1:-1]]
    inputs = [record.__enter__() for record in recorded]
    for step in range(4):
        model(batch(step)).square().mean()
    for report, seen in zip(monitor.report(), inputs, strict=True):
        assert_statistics(report, torch.cat(seen).flatten(0, -2))
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
    model = make_model()
    monitor = NormMonitor(model, every=1)
    for step in range(3):
        scale = math.inf if step == 1 else 1.0
        (model(batch(step)).square().mean() * scale).backward()
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
    with recording(model.columns) as inputs, recording(model.group) as grouped:
        y = model(x, mask)
    model.total.retain_grad()
    y.square().sum().backward()
    columns, scale, group, adaptive, add = monitor.report()
    assert [r.name for r in monitor.report()] == ["columns", "scale", "group", "adaptive", "add"]
    assert_statistics(columns, torch.cat([inputs[0].flatten(0, 1), inputs[1][mask]]))
    assert_statistics(group, grouped[0].transpose(1, 2).flatten(0, 1))
    assert scale.last("weight_norm") == 3 and scale.last("weight_grad_norm") > 0
    assert adaptive.seen and math.isnan(adaptive.last("weight_norm"))
    assert_statistics(add, model.total.detach().flatten(0, 1))


def test_the_gradient_of_an_added_sum() -> None:
    """That of the sum as a whole: by way of the norm and by way of the stream."""

    @_ours
    class AddNorm(nn.Module):
        def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = input + residual
            return F.layer_norm(total, (DIM,)), total

    add = AddNorm()
    monitor = NormMonitor(add, every=1)
    x = batch(0).double().requires_grad_()
    y, total = add(x.sin(), batch(1).double())
    (y.cos().sum() + total.square().sum()).backward()
    leaf = (x.detach().sin() + batch(1)).requires_grad_()
    (F.layer_norm(leaf, (DIM,)).cos().sum() + leaf.square().sum()).backward()
    assert leaf.grad is not None
    # A sum of 720 squares, and the norm's own rounding.
    assert monitor.report()[0].last("input_grad_norm") == pytest.approx(float(leaf.grad.norm()), rel=1e-12)


def test_own_classes() -> None:
    model = make_model(lambda dim: nn.Tanh())
    with pytest.raises(
        ValueError, match="NormMonitor: model: expected a model with a norm .* got Sequential"
    ):
        NormMonitor(model)
    monitor = NormMonitor(model, every=1, also=(Block, nn.Tanh))
    with recording(model[3]) as inputs:
        train(model, 1)
    names = [report.name for report in monitor.report()]
    assert sorted(names) == ["1", "1.norm", "2", "2.norm", "3", "3.norm"]
    assert_statistics(monitor.report()[names.index("3")], inputs[0].flatten(0, 1))


def test_an_input_that_changes_its_width() -> None:
    model = nn.Sequential(nn.Identity())
    NormMonitor(model, every=1, also=(nn.Identity,))
    model(torch.ones(2, 3))
    message = "NormMonitor: 0: expected an input with 3 features, as before, got 4"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, 4))


class _Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, (int, float)) and not math.isnan(value) and isinstance(step, int)
        self.scalars.setdefault(tag, {})[step] = value


def test_scalars() -> None:
    writer, model = _Writer(), make_model()
    model[2].norm.weight = None
    with recording(model[1].norm) as inputs, NormMonitor(model, every=2, writer=writer) as monitor:
        train(model, 3)
        assert list(writer.scalars["norms/1.norm/weight_norm"]) == [0]  # step 2 is not over
    series = monitor.report()[0].series
    for key in ("largest", "weight_norm", "weight_grad_norm", "input_grad_norm", "nonfinite_input"):
        assert writer.scalars[f"norms/1.norm/{key}"] == dict(zip([0, 2], series[key], strict=True))
    own = inputs[2].double().flatten(0, -2).std(0, correction=0).median()  # that step's alone
    assert writer.scalars["norms/1.norm/median_std"][2] == pytest.approx(float(own), rel=1e-12)
    assert writer.scalars["norms/1.norm/outliers"] == {0: 0, 2: 0}
    assert "norms/2.norm/largest" in writer.scalars and "norms/2.norm/weight_norm" not in writer.scalars


def test_table_json_and_picture(tmp_path: Path) -> None:
    model = make_model(fusednorm.RMSNorm)
    model.append(nn.ModuleList([nn.LayerNorm(3)]).requires_grad_(False))
    model[-1].forward = lambda x: x  # its norm never runs
    monitor = NormMonitor(model, every=2)
    with pytest.raises(RuntimeError, match=r"NormMonitor.plot: no step was observed"):
        monitor.plot(tmp_path / "none.png")
    train(model, 3)
    model(batch(0) * math.inf)  # step 3 is not observed
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
    model = make_model()
    monitor = NormMonitor(model, every=1)
    train(model, 1)
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
    model = make_model()
    with pytest.raises(error, match=f"fusednorm.NormMonitor: {message}"):
        NormMonitor(**{"model": model, **kw})
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="NormMonitor.step: expected manual_steps=True, got False"):
        NormMonitor(model).step()
