"""Trains a small GPT with torch.nn's norms and with ours, and shows that the losses agree.

LayerNorm and RMSNorm, from torch.nn and from fusednorm, in fp32 and in bf16 (the whole model, no autocast):
eight models with the same initial weights see the same batches of real English text, character by character.
The models of a dtype take turns, a step each, so that what else the machine does slows all of them alike.

Training magnifies rounding: two runs that differ in a last bit drift apart. How far is measured, not assumed:
a yardstick run per dtype is nn.RMSNorm's again with the token embedding changed in its last bit.

Prints a table; writes losses.png, results.json and sample.txt. About four minutes on two cores.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

import fusednorm

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no display)

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 128, 8
LEARNING_RATE, WARMUP = 1e-3, 40  # at 1.5e-3 bf16 is unstable early on, with anyone's norms
SEED, VAL_BATCHES, TAIL, PROFILED_STEPS = 1, 8, 20, 7
NORMS: dict[str, Callable[..., nn.Module]] = {
    "nn.LayerNorm": nn.LayerNorm,
    "fusednorm.LayerNorm": fusednorm.LayerNorm,
    "nn.RMSNorm": nn.RMSNorm,
    "fusednorm.RMSNorm": fusednorm.RMSNorm,
}
EPS = 1e-5  # given to all, for RMSNorm's default is another
YARDSTICK = "nn.RMSNorm, last bit"
# A yardstick is a single sample of the drift: differences up to this many times its own count as rounding.
SAME = 4.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Attention(nn.Module):
    """Causal attention; `qk_norm` makes norms of queries and keys, head by head."""

    def __init__(self, width: int, qk_norm: Callable[[int], nn.Module] = lambda _: nn.Identity()) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = qk_norm(width // HEADS), qk_norm(width // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PreNorm(nn.Module):
    """A sublayer behind its norm, added to what came in."""

    def __init__(self, sublayer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.sublayer, self.norm = sublayer, norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sublayer(self.norm(x))


class GPT(nn.Module):
    """A GPT over characters.

    `norm` makes its norms, of a width; `place(sublayer, norm)` puts one and its residual around a sublayer;
    `final` is whether one more stands before the output, as a pre-norm model needs it.
    """

    def __init__(
        self,
        vocabulary: int,
        norm: Callable[[int], nn.Module],
        place: Callable[[nn.Module, nn.Module], nn.Module] = PreNorm,
        *,
        layers: int = LAYERS,
        width: int = WIDTH,
        final: bool = True,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            sublayers = Attention(width, **attention), FeedForward(width)
            self.blocks.append(nn.Sequential(*[place(sublayer, norm(width)) for sublayer in sublayers]))
        self.norm = norm(width) if final else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # leaves the norms as they are; smaller where the residual adds up
                deep = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        # The loss is taken in fp32, so that its own rounding does not hide the norms'.
        return self.head(self.norm(self.blocks(x))).float()


@dataclass
class Corpus:
    """Text as character numbers, its last tenth kept for validation."""

    alphabet: list[str]
    train: Tensor
    val: Tensor

    def batches(self, part: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(part) - CONTEXT, (BATCH,), generator=generator)
            rows = part[(starts[:, None] + torch.arange(CONTEXT + 1)).to(part.device)]
            yield rows[:, :-1], rows[:, 1:]


@dataclass
class Run:
    """One model in training, and what was measured of it."""

    norm: str
    dtype: str
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, norm: str, dtype: str, vocabulary: int, device: torch.device) -> "Run":
        torch.manual_seed(SEED)  # norms draw no random numbers: the weights are the same in all models
        make = partial(NORMS["nn.RMSNorm" if norm == YARDSTICK else norm], eps=EPS)
        model = GPT(vocabulary, make).to(device, DTYPES[dtype])
        if norm == YARDSTICK:
            with torch.no_grad():
                weight = model.tokens.weight
                weight *= 1 + torch.finfo(weight.dtype).eps * torch.randn_like(weight).sign()
        return cls(norm, dtype, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Trains on a batch; returns the loss and the seconds it took."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        value = loss.item()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return value, time.perf_counter() - start


def train(runs: list[Run], corpus: Corpus, steps: int) -> None:
    """Trains the models in turns, with a progress bar each; a few plain lines where there is no terminal."""
    terminal = sys.stderr.isatty()
    bars = [
        tqdm(total=steps, desc=f"{r.norm:20} {r.dtype}", position=i, disable=not terminal, unit="step")
        for i, r in enumerate(runs)
    ]
    batches = corpus.batches(corpus.train, SEED)
    for step in range(steps):
        batch = next(batches)
        rate = min((step + 1) / WARMUP, 1.0) * (1 - 0.9 * step / steps)
        # Each step another model goes first: the first one finds the batch out of cache.
        for i in [(step + k) % len(runs) for k in range(len(runs))]:
            runs[i].optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
            loss, seconds = runs[i].step(batch)
            runs[i].losses.append(loss)
            runs[i].seconds.append(seconds)
            bars[i].set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bars[i].update()
        if not terminal and ((step + 1) % max(steps // 4, 1) == 0 or step + 1 == steps):
            shown = ", ".join(f"{r.norm} {r.losses[-1]:.4f}" for r in runs)
            print(f"{runs[0].dtype} step {step + 1}/{steps}: loss {shown}", file=sys.stderr, flush=True)
    for bar in bars:
        bar.close()


def norm_seconds(profiler: profile, cuda: bool) -> float:
    """Time in the norms' operators, forward and backward, of one profiled step.

    Forward: the operators right inside a "norm_forward" mark. Backward: autograd's nodes that those operators
    made. Autograd numbers its nodes one after the other, and an operator's event has the next free number as
    it starts; so a norm's nodes run from its first operator's number up to that of the operator after it.
    A node's time includes adding its gradient to the residual branch's, which comes with every norm alike.
    """

    def spent(event: Any) -> float:
        return (event.device_time_total if cuda else event.cpu_time_total) / 1e6

    total, nodes, first = 0.0, set[int](), -1
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.cpu_parent is not None and event.cpu_parent.name == "norm_forward":
            total += spent(event)
            first = event.sequence_nr if first < 0 else first
        elif first >= 0 and event.cpu_parent is None and event.sequence_nr >= 0:
            nodes.update(range(first, event.sequence_nr))
            first = -1
        elif event.name.startswith("autograd::engine::evaluate_function: ") and event.sequence_nr in nodes:
            total += spent(event)
    return total


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keeps away what torch's profiler writes to the error stream each time; errors still raise."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def profile_norms(runs: list[Run], batches: Iterator[tuple[Tensor, Tensor]], cuda: bool) -> None:
    """Measures the norms' part of a training step with the profiler, the models again in turns."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    samples: list[list[tuple[float, float]]] = [[] for _ in runs]
    for module in [module for run in runs for module in run.model.modules()]:
        if isinstance(module, tuple(NORMS.values())):
            # Lets the profiler find a norm's forward, whatever operators it is made of.
            module.forward = record_function("norm_forward")(module.forward)
    for _ in range(PROFILED_STEPS):
        batch = next(batches)
        for run, sample in zip(runs, samples, strict=True):
            with quiet_stderr(), profile(activities=activities) as profiler:
                _, seconds = run.step(batch)
            sample.append((norm_seconds(profiler, cuda), seconds))
    for run, sample in zip(runs, samples, strict=True):
        # The least of several: what disturbs a step only ever adds to it.
        norms, steps = (min(column) for column in zip(*sample, strict=True))
        run.results |= {"norm_ms_per_step": 1e3 * norms, "norm_share": norms / steps}


@torch.no_grad()
def validate(run: Run, corpus: Corpus) -> float:
    batches = corpus.batches(corpus.val, SEED)
    return statistics.fmean(run.loss(next(batches)).item() for _ in range(VAL_BATCHES))


def apart(a: list[float], b: list[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def measure(runs: list[Run], corpus: Corpus) -> None:
    """Fills in the results of a dtype's trained models."""
    losses = {run.norm: run.losses for run in runs}
    for run in runs:
        run.results["tokens_per_second"] = BATCH * CONTEXT / statistics.median(run.seconds)
        run.results["train_loss"] = statistics.fmean(run.losses[-TAIL:])
        run.results["val_loss"] = validate(run, corpus)
        reference = losses["nn.LayerNorm" if "LayerNorm" in run.norm else "nn.RMSNorm"]
        own = run.losses is reference
        run.results["max_loss_difference"] = None if own else max(apart(run.losses, reference))
    # Last, for these steps train the models on.
    batches = corpus.batches(corpus.train, SEED + 1)
    profile_norms([run for run in runs if run.norm != YARDSTICK], batches, corpus.train.is_cuda)


@torch.no_grad()
def generate(model: GPT, corpus: Corpus, count: int) -> str:
    """Text from the model, character by character, starting on a new line."""
    generator = torch.Generator().manual_seed(SEED)
    ids = [corpus.alphabet.index("\n") if "\n" in corpus.alphabet else 0]
    for _ in range(count):
        context = torch.tensor([ids[-CONTEXT:]], device=model.head.weight.device)
        chances = (model(context)[0, -1] / 0.8).softmax(-1).cpu()
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    return "".join(corpus.alphabet[i] for i in ids[1:])


def table(runs: list[Run]) -> str:
    """The results as aligned text."""
    columns = {
        "tokens/s": ("tokens_per_second", ".0f"),
        "norms ms/step": ("norm_ms_per_step", ".2f"),
        "norms share": ("norm_share", ".1%"),
        "train loss": ("train_loss", ".4f"),
        "val loss": ("val_loss", ".4f"),
        "largest difference": ("max_loss_difference", ".1e"),
    }
    lines = [f"{'norm':20}  {'dtype':5}  " + "  ".join(columns)]
    for run in runs:
        values = [(run.results.get(key), form, len(name)) for name, (key, form) in columns.items()]
        cells = [("-" if value is None else format(value, form)).rjust(n) for value, form, n in values]
        lines.append("  ".join([f"{run.norm:20}", f"{run.dtype:5}", *cells]))
    return "\n".join(lines)


def verdict(runs: list[Run], dtype: str) -> str:
    """Whether a dtype's losses with our norms follow torch's within rounding, in a line."""
    mine = {run.norm: run for run in runs if run.dtype == dtype}
    if not all(math.isfinite(loss) for run in mine.values() for loss in run.losses):
        return f"{dtype}: a loss is not finite; training failed"
    largest = max(r.results["max_loss_difference"] for r in mine.values() if r.norm.startswith("fusednorm"))
    drift = mine[YARDSTICK].results["max_loss_difference"]
    last_place = torch.finfo(torch.float32).eps * max(mine[YARDSTICK].losses)  # a short run may not drift
    answer = "follow" if largest <= SAME * max(drift, last_place) else "DO NOT follow"
    return (
        f"{dtype}: losses with our norms {answer} torch's within rounding: largest difference {largest:.1e}; "
        f"torch from itself, an embedding's last bit changed: {drift:.1e}"
    )


def plot(runs: list[Run], file: Path) -> None:
    """Loss curves, torch's and ours on the same axes, above their absolute difference."""

    def drawable(a: list[float], b: list[float]) -> list[float]:
        return [max(difference, 1e-8) for difference in apart(a, b)]  # a log axis has no 0

    figure, axes = plt.subplots(
        2, len(DTYPES), figsize=(13, 8), sharex=True, sharey="row", layout="constrained", height_ratios=[3, 2]
    )
    for (curves, differences), dtype in zip(axes.T, DTYPES, strict=True):
        mine = {run.norm: run.losses for run in runs if run.dtype == dtype}
        steps = range(1, len(mine[YARDSTICK]) + 1)
        for kind, color in ("LayerNorm", "tab:blue"), ("RMSNorm", "tab:orange"):
            theirs, ours = mine[f"nn.{kind}"], mine[f"fusednorm.{kind}"]
            # Wide and pale below, thin and dashed above: both show where they overlap.
            curves.plot(steps, theirs, color=color, alpha=0.35, linewidth=5, label=f"nn.{kind}")
            curves.plot(steps, ours, color=color, linestyle="--", linewidth=1.2, label=f"fusednorm.{kind}")
            label = f"fusednorm.{kind} - nn.{kind}"
            differences.plot(steps, drawable(theirs, ours), color=color, linewidth=1.2, label=label)
        drift = drawable(mine["nn.RMSNorm"], mine[YARDSTICK])
        label = "nn.RMSNorm - itself, an embedding's last bit changed"
        differences.plot(steps, drift, color="black", linestyle=":", linewidth=1.2, label=label)
        differences.set_yscale("log")
        curves.set_title(f"{dtype}: training loss")
        differences.set(title="absolute difference of the losses (0 is drawn at 1e-8)", xlabel="step")
        for axis in curves, differences:
            axis.grid(alpha=0.3)
        curves.legend(loc="upper right")
        differences.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))  # below: the panel is full
    axes[0, 0].set_ylabel("cross-entropy (nats per character)")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fusednorm": fusednorm.build_info(),
    }


def positive(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number of 1 or more")
    return int(value)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{name!r} is not available here; try cpu ({reason})") from error
    if device.type == "cuda" and fusednorm.build_info()["cuda"] is None:
        raise argparse.ArgumentTypeError("this fusednorm was built without CUDA; rebuild it with, or use cpu")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"fusednorm has no kernels for {device.type!r}; use cpu or cuda")
    return device


def read_text(file: Path | None) -> str:
    """The user's text, or the standard library's help topics: English that is on every machine."""
    if file is None:
        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"demo.py: --text: cannot read {file}: {error.strerror}; name another") from error
    except UnicodeDecodeError as error:
        raise SystemExit(f"demo.py: --text: {file} is not UTF-8 text ({error}); convert it first") from error
    if len(text) < 10 * (CONTEXT + 2):  # the last tenth has to hold a context and the character after it
        raise SystemExit(
            f"demo.py: --text: {file} has {len(text)} characters, too few for a context of {CONTEXT}: "
            f"at least {10 * (CONTEXT + 2)} are needed, some 100,000 are better"
        )
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--steps", type=positive, default=160, metavar="N", help="steps of each run (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to train on (default: Python's help topics)")
    add("--device", type=usable_device, default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "build/demo", metavar="DIR", help="where to write (build/demo)")
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    args = arguments()
    text = read_text(args.text)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"demo.py: --out: cannot make the folder {args.out}: {error.strerror}") from error
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = torch.tensor([number[character] for character in text], device=args.device)
    split = len(ids) * 9 // 10
    corpus = Corpus(alphabet, ids[:split], ids[split:])
    print(f"{len(text)} characters, {len(alphabet)} different; {args.steps} steps of {BATCH} x {CONTEXT}")

    runs: list[Run] = []
    for dtype in DTYPES:
        turn = [Run.start(norm, dtype, len(alphabet), args.device) for norm in [*NORMS, YARDSTICK]]
        train(turn, corpus, args.steps)
        measure(turn, corpus)
        runs += turn
    sampler = next(run for run in runs if (run.norm, run.dtype) == ("fusednorm.RMSNorm", "fp32"))
    sample = generate(sampler.model, corpus, 400)

    (args.out / "sample.txt").write_text(sample, encoding="utf-8")
    plot(runs, args.out / "losses.png")
    verdicts = {dtype: verdict(runs, dtype) for dtype in DTYPES}
    keys = "norm", "dtype", "losses", "seconds"
    results = {
        "machine": machine(args.device),
        "settings": {"steps": args.steps, "batch": BATCH, "context": CONTEXT, "width": WIDTH},
        "runs": [run.results | {key: getattr(run, key) for key in keys} for run in runs],
        "verdicts": verdicts,
        "seconds": time.perf_counter() - start,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(runs)}\n\nText from the fp32 model with fusednorm.RMSNorm:\n{sample[:200]}\n")
    print(f"{results['seconds']:.0f} s; wrote losses.png, results.json and sample.txt to {args.out}")
    print("\n".join(verdicts.values()))


if __name__ == "__main__":
    main()
