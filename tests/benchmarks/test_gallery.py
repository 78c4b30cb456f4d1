"""The gallery: two variants trained for some steps by the program; its arithmetic on made-up numbers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusednorm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gallery  # noqa: E402  (the benchmarks are programs, no package)
import gallery_claims  # noqa: E402
import gallery_report  # noqa: E402
import gallery_variants  # noqa: E402
from demo import LEARNING_RATE, PreNorm  # noqa: E402
from gallery_variants import HARD_RATE, VARIANTS, Variant  # noqa: E402

LAYERS, WIDTH, VOCABULARY = 2, 16, 7
PRESENT = [variant for variant in VARIANTS if not variant.missing()]


def _gallery(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks/gallery.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_two_variants(tmp_path: Path) -> None:
    sizes = ("--quick", "--steps", "8", "--layers", "2", "--width", "16")
    ran = _gallery(*sizes, "--only", "^(no norm|LayerNorm)$", "--out", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content = json.loads(
        (tmp_path / "gallery.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert content["settings"] == {"steps": 8, "layers": 2, "width": 16, "batch": 8, "context": 128}
    assert content["machine"]["cpu"] and content["machine"]["threads"] == 1 and content["missing"] == {}
    bare, normed = content["runs"]
    assert (bare["name"], normed["name"]) == ("no norm", "LayerNorm")
    assert (bare["groups"], normed["groups"]) == (["norms"], ["norms", "placements"])
    assert (bare["norms_watched"], normed["norms_watched"]) == (0, 2 * 2 + 1)
    for run in content["runs"]:
        assert len(run["losses"]) == 8 and run["nonfinite"] == 0 and run["tokens_per_second"] > 0
        assert 0 < run["train_loss"] < run["losses"][0] and 0 < run["val_loss"] < run["losses"][0]
        assert run["train_loss"] == pytest.approx(sum(run["losses"][-2:]) / 2)  # a quarter of the steps
        assert run["observed_steps"] == list(range(8))
        assert [len(norms) for norms in run["gradient_norms"]] == [4] * 8  # two sublayers to a layer
        assert all(norm > 0 for norms in run["gradient_norms"] for norm in norms)
    deep = content["claims"]["deep_gradients"]
    assert len(deep) == 10 and all(len(entry["gradient_norms"]) == gallery_claims.DEPTH for entry in deep)
    padding = content["claims"]["padding"]
    assert padding[0]["norm"] == "LayerNorm" and len(padding) == (3 if hasattr(fusednorm, "BatchNorm") else 1)
    for entry in padding:
        assert entry["gap"] == pytest.approx(entry["val_loss"] / entry["train_loss"] - 1)
    # LayerNorm is the same in training and in evaluation.
    assert padding[0]["val_loss"] == padding[0]["val_loss_in_training_mode"]
    assert (content["claims"]["batch_of_one"] is None) == (not hasattr(fusednorm, "BatchNorm"))
    for name in ("gallery_norms.png", "gallery_placements.png", "gallery_stacks.png", "monitor.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "gallery.txt").read_text()
    assert text in ran.stdout and "left out" not in text
    monitored = (tmp_path / "monitor.txt").read_text()
    assert "blocks.0.0.norm  LayerNorm" in monitored and "PreNorm" not in monitored


def test_missing_names_are_said() -> None:
    variant = Variant("x", gallery_variants.layer_norm, needs=("LayerNorm", "NoSuchNorm"))
    assert variant.missing() == ["NoSuchNorm"]
    stack = {"stack": "F(x)", "initialisation": "He", "gradient_norms": [1.0, 2.0], "factor_per_layer": None}
    results = {
        "missing": {"x": variant.missing()},
        "runs": [],
        "settings": dict.fromkeys(("steps", "batch", "context", "layers", "width"), 1),
        "claims": {"deep_gradients": [stack], "padding": [], "batch_of_one": None},
        "machine": gallery.machine.describe() | {"threads": 1},
    }
    assert "left out, missing in this fusednorm: x" in gallery_report.summary(results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "NoSuchNorm"), "no variant is left; there are: no norm; LayerNorm"),
        (("--only", "("), "'(' is no regular expression"),
        (("--width", "12"), "--width: expected a multiple of 8"),
        (("--steps", "0"), "'0' is not a whole number of 1 or more"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gallery.py", *arguments])
    with pytest.raises(SystemExit):
        gallery.arguments()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("variant", PRESENT, ids=lambda variant: variant.name)
def test_every_variant_trains(variant: Variant) -> None:
    """A step forward and back, by the monitor's account too; the same weights in all, but for DeepNorm's."""
    model = variant.build(VOCABULARY, LAYERS, WIDTH)
    stream = gallery_variants.residual_classes()
    with fusednorm.NormMonitor(model, every=1, also=stream) as monitor:
        model(torch.randint(VOCABULARY, (2, 5))).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    reports = monitor.report()
    assert all(report.seen and report.last("input_grad_norm") > 0 for report in reports)
    kinds = [report.kind for report in reports]
    sublayers = sum(kinds.count(kind.__name__) for kind in stream)
    assert sublayers == 2 * LAYERS
    norms = len(kinds) - sublayers
    extra = {"no norm": -2 * LAYERS - 1, "RMSNorm, and of q and k": 2 * LAYERS}.get(variant.name, 0)
    extra += {"pre": 1, "post": 0, "deep": 0, "sandwich": 2 * LAYERS + 1}[variant.placement]
    assert norms == 2 * LAYERS + extra
    plain = gallery_variants.VARIANTS[1].build(VOCABULARY, LAYERS, WIDTH)
    own, theirs = (m.blocks[0][0].sublayer.qkv.weight for m in (model, plain))
    assert torch.equal(own, theirs) == (variant.placement != "deep")


@pytest.mark.parametrize("variant", PRESENT, ids=lambda variant: variant.name)
def test_the_monitor_changes_no_bits(variant: Variant) -> None:
    """Whatever the norm keeps from step to step, and whether or not a placement fuses it with a sum."""
    losses: list[list[float]] = []
    for every in (None, 2):
        model = variant.build(VOCABULARY, LAYERS, WIDTH)
        if every is not None:
            fusednorm.NormMonitor(model, every, also=gallery_variants.residual_classes())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(4):
            ids = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1] and len(set(losses[0])) == 4


def test_rates() -> None:
    gentle, hard = VARIANTS[1], next(variant for variant in VARIANTS if variant.hard)
    assert gentle.rate(0, 160) == LEARNING_RATE / 40 and gentle.rate(39, 160) < LEARNING_RATE
    assert gentle.rate(0, 8) == LEARNING_RATE / 2 and hard.rate(0, 160) == HARD_RATE
    assert gentle.rate(159, 160) == pytest.approx(0.1 * LEARNING_RATE, rel=0.06)


def test_slope_of_gradients() -> None:
    norms = [2.0 * 3.0**-layer for layer in range(30)]  # they grow threefold a layer on their way back
    found = gallery_claims.slope(norms)
    assert found["factor_per_layer"] == pytest.approx(3.0) and found["r_squared"] == pytest.approx(1.0)
    flat = gallery_claims.slope([1.0, math.e] * 20)
    assert flat["factor_per_layer"] == pytest.approx(1.0, abs=0.01) and flat["r_squared"] < 0.1
    assert gallery_claims.slope([math.inf] * 30)["factor_per_layer"] is None


def test_deep_gradients_are_autograds() -> None:
    found = gallery_claims.deep_gradients(depth=3)[2]
    assert (found["stack"], found["initialisation"]) == ("x + F(x)", "torch's default")
    torch.manual_seed(gallery_claims.SEED)
    stages = [gallery_claims.Stage("x + F(x)", "torch's default") for _ in range(3)]
    x, weights = torch.randn(2, gallery_claims.STACK_ROWS, gallery_claims.STACK_WIDTH)
    inputs = [x.requires_grad_()]
    for stage in stages:
        inputs.append(stage(inputs[-1]))
    gradients = torch.autograd.grad((inputs[-1] * weights).sum(), inputs[:-1])
    expected = [float(gradient.double().norm()) for gradient in gradients]
    assert found["gradient_norms"] == pytest.approx(expected, rel=1e-12)


def test_padded_batches() -> None:
    alphabet = list("abc")
    text = torch.randint(3, (2000,))
    corpus = gallery_claims.Corpus(alphabet, text, text)
    ids, targets, mask = next(gallery_claims.padded(corpus, text, seed=1))
    lengths = mask.sum(1)
    assert (lengths >= 16).all() and (lengths <= 128).all() and len(set(lengths.tolist())) > 1
    assert torch.equal(ids == 3, ~mask) and torch.equal(targets == gallery_claims.IGNORED, ~mask)
    assert torch.equal(targets[:, :15], ids[:, 1:16])  # within the shortest


def test_a_mask_is_handed_on() -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask[..., None]

    masks = {"now": torch.tensor([[True, False]])}
    norm = gallery_claims.Masked(Norm(), masks)
    assert norm(torch.ones(1, 2, 3)).tolist() == [[[1, 1, 1], [0, 0, 0]]]


def test_table_of_a_failed_run() -> None:
    run = {"name": "x", "groups": ["norms"], "tokens_per_second": 10.0, "train_loss": math.nan,
           "val_loss": math.inf, "early_rises": 1.0, "gradient_norms": [[4.0, 2.0], [math.nan, 0.0]],
           "outliers": {"a": [[0, 20.0], [3, 0.01]]}, "nonfinite": 5, "norms_watched": 1}  # fmt: skip
    cells = gallery_report.table([run]).splitlines()[-1].split()
    assert cells == ["x", "10", "nan", "inf", "1.00", "2", "nan", "2", "5"]


def test_the_demos_default_is_pre_norm() -> None:
    model = VARIANTS[1].build(VOCABULARY, LAYERS, WIDTH)
    block = model.blocks[0][0]
    assert isinstance(block, PreNorm)
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(block(x), x + block.sublayer(block.norm(x)), rtol=0, atol=0)
