"""Trains the demo's GPT with every norm and every placement, on the same batches from the same seed.

Deeper and narrower than in the demo (8 layers of 128), for placements differ in how they carry gradients. The
models take turns, a step each, so that what else the machine does slows all of them alike. Each is watched by
fusednorm.NormMonitor, at its norms and along the residual stream. Three groups: norms in one place,
placements of one norm, and ways to begin under a learning rate that is hard on them. Beside that, what people
say of norms and depth, and of BatchNorm and padding, as far as it costs little to measure.

Prints a table and what was seen; writes gallery_*.png, gallery.json and gallery.txt, and for the LayerNorm
model all that the monitor has to say: monitor.png, monitor.txt. Under ten minutes on two cores.
"""

import argparse
import json
import math
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import fusednorm
import gallery_claims
import gallery_report
import machine
from demo import BATCH, CONTEXT, ROOT, SEED, TAIL, Corpus, Run, positive, read_text, validate
from gallery_variants import VARIANTS, Variant, residual_classes

EXAMPLE = "LayerNorm"
OBSERVATIONS = 8  # by the monitor, in a run
SIZES = {False: {"steps": 160, "layers": 8, "width": 128}, True: {"steps": 24, "layers": 4, "width": 64}}


@dataclass
class Entry:
    """A variant in training."""

    variant: Variant
    run: Run
    monitor: fusednorm.NormMonitor  # of the residual stream, too
    example: fusednorm.NormMonitor | None  # of the norms alone, to be shown in full
    warmup: Any

    @classmethod
    def start(cls, variant: Variant, corpus: Corpus, args: argparse.Namespace) -> "Entry":
        model = variant.build(len(corpus.alphabet), args.layers, args.width)
        run = Run(variant.name, "fp32", model, torch.optim.AdamW(model.parameters(), fused=True))
        every = max(args.steps // OBSERVATIONS, 1)
        example = fusednorm.NormMonitor(model, every) if variant.name == EXAMPLE else None
        monitor = fusednorm.NormMonitor(model, every, also=residual_classes())
        steps = max(args.steps // 4, 1)
        warmup = variant.warmup and fusednorm.NormWarmup(model, steps, variant.warmup)
        return cls(variant, run, monitor, example, warmup)

    def step(self, batch: tuple[Tensor, Tensor], rate: float) -> None:
        self.run.optimizer.param_groups[0]["lr"] = rate
        loss, seconds = self.run.step(batch)
        self.run.losses.append(loss)
        self.run.seconds.append(seconds)
        if self.warmup:
            self.warmup.step()

    def results(self, corpus: Corpus) -> dict[str, Any]:
        """What came of it; ends the training."""
        self.monitor.remove()
        if self.example is not None:
            self.example.remove()
        self.run.model.eval()
        kinds = {kind.__name__ for kind in residual_classes()}
        reports = self.monitor.report()
        stream = [report for report in reports if report.kind in kinds]
        norms = [report for report in reports if report.kind not in kinds]
        losses, early = self.run.losses, self.run.losses[: max(len(self.run.losses) // 4, 2)]
        series = [report.series["input_grad_norm"] for report in stream]
        return {
            "name": self.variant.name,
            "groups": list(self.variant.groups),
            "tokens_per_second": BATCH * CONTEXT / statistics.median(self.run.seconds),
            "train_loss": statistics.fmean(losses[-min(TAIL, len(early)) :]),
            "val_loss": validate(self.run, corpus),
            "early_rises": sum(max(b - a, 0.0) for a, b in zip(early, early[1:], strict=False)),
            "observed_steps": [int(step) for step in stream[0].series["step"]],
            # By observed step, then from the first sublayer's input to the last one's.
            "gradient_norms": [list(by_depth) for by_depth in zip(*series, strict=True)],
            "outliers": {r.name: [[o.dim, o.ratio] for o in r.outliers] for r in norms if r.outliers},
            "nonfinite": sum(
                sum(r.series["nonfinite_input"]) + sum(r.series["nonfinite_grad"]) for r in reports
            ),
            "norms_watched": len(norms),
            "losses": losses,
        }


def train(entries: list[Entry], corpus: Corpus, steps: int) -> None:
    """Trains in turns, with a progress bar, or some plain lines where there is no terminal."""
    batches = corpus.batches(corpus.train, SEED)
    terminal = sys.stderr.isatty()
    with tqdm(total=steps * len(entries), unit="step", desc="training", disable=not terminal) as bar:
        for step in range(steps):
            batch = next(batches)
            for i in range(len(entries)):
                entry = entries[(step + i) % len(entries)]  # another one finds the batch out of cache
                entry.step(batch, entry.variant.rate(step, steps))
                bar.update()
            losses = sorted(entry.run.losses[-1] for entry in entries)
            bar.set_postfix_str(f"losses {losses[0]:.3f} to {losses[-1]:.3f}")
            if not terminal and ((step + 1) % max(steps // 8, 1) == 0 or step + 1 == steps):
                print(f"step {step + 1}/{steps}: losses {losses[0]:.3f} to {losses[-1]:.3f}", file=sys.stderr)


def regex(value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{value!r} is no regular expression: {error}") from error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller models, fewer steps: under a minute")
    for size, value in SIZES[False].items():
        quick = SIZES[True][size]
        add(f"--{size}", type=positive, metavar="N", help=f"{size} of each model ({value}; {quick} if quick)")
    add("--only", type=regex, default="", metavar="REGEX", help="train the variants whose names match")
    add(
        "--out",
        type=Path,
        default=ROOT / "build/gallery",
        metavar="DIR",
        help="where to write (build/gallery)",
    )
    args = parser.parse_args()
    for size, value in SIZES[args.quick].items():
        setattr(args, size, getattr(args, size) or value)
    if args.width % 8:
        parser.error(f"--width: expected a multiple of 8 (4 heads, 4 groups), got {args.width}")
    args.variants = [variant for variant in VARIANTS if re.search(args.only, variant.name)]
    if not args.variants:
        parser.error("--only: no variant is left; there are: " + "; ".join(v.name for v in VARIANTS))
    return args


def main() -> None:
    start = time.perf_counter()
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    text = read_text(None)
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = torch.tensor([number[character] for character in text])
    corpus = Corpus(alphabet, ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :])
    about = machine.describe() | {"threads": torch.get_num_threads()}

    missing = {variant.name: variant.missing() for variant in args.variants if variant.missing()}
    entries = [Entry.start(v, corpus, args) for v in args.variants if v.name not in missing]
    for name, names in missing.items():
        print(f"left out: {name}: this fusednorm has no {', '.join(names)}")
    sizes = f"{args.layers} layers of {args.width}; {args.steps} steps of {BATCH} x {CONTEXT}"
    print(f"{len(entries)} models of {sizes}")
    train(entries, corpus, args.steps)
    runs = [entry.results(corpus) for entry in entries]
    print("claims: gradients in deep stacks, padded text", file=sys.stderr)
    claims = {
        "deep_gradients": gallery_claims.deep_gradients(),
        "padding": gallery_claims.padding(corpus, args.steps, max(args.layers // 2, 1), args.width),
        "batch_of_one": gallery_claims.single_sample(),
    }
    results = {
        "machine": about,
        "settings": {key: getattr(args, key) for key in SIZES[False]} | {"batch": BATCH, "context": CONTEXT},
        "missing": missing,
        "runs": runs,
        "claims": claims,
        "seconds": time.perf_counter() - start,
    }
    for entry in entries:
        if entry.example is not None:
            entry.example.plot(args.out / "monitor.png")
            (args.out / "monitor.txt").write_text(entry.example.table() + "\n", encoding="utf-8")
    pictures = gallery_report.plot(results, args.out)
    (args.out / "gallery.json").write_text(
        json.dumps(finite(results), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    summary = gallery_report.summary(results)
    (args.out / "gallery.txt").write_text(summary + "\n", encoding="utf-8")
    written = ", ".join(["gallery.json", "gallery.txt", *pictures])
    print(f"\n{summary}\n\n{results['seconds']:.0f} s; wrote {written} to {args.out}")


def finite(value: Any) -> Any:
    """With null for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
