"""Trains a small GPT with torch.nn's norms and with ours, and shows that the losses agree.

LayerNorm and RMSNorm, from torch.nn and from fusednorm, in fp32 and in bf16 (the whole model, no autocast):
eight models with the same initial weights see the same batches of real English text, character by character.
The four models of a dtype take turns, a step each, so that what else the machine does slows all of them alike.

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
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 128, 12
LEARNING_RATE, WARMUP = 1.5e-3, 20
SEED, VAL_BATCHES, TAIL, PROFILED_STEPS = 1, 8, 20, 5
# eps is given to all, for nn.RMSNorm's default depends on the dtype.
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.LayerNorm": partial(nn.LayerNorm, eps=1e-5),
    "fusednorm.LayerNorm": partial(fusednorm.LayerNorm, eps=1e-5),
    "nn.RMSNorm": partial(nn.RMSNorm, eps=1e-5),
    "fusednorm.RMSNorm": partial(fusednorm.RMSNorm, eps=1e-5),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MarkedNorm(nn.Module):
    """A norm whose forward the profiler can find, whatever operators it is made of."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.marked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.marked:  # the mark itself takes time, so training goes without
            return self.norm(x)
        with record_function("norm_forward"):
            return self.norm(x)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind its norm and added to what came in."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = MarkedNorm(norm(WIDTH)), MarkedNorm(norm(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A pre-norm GPT over characters; `norm` makes its norms from their width."""

    def __init__(self, vocabulary: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block(norm) for _ in range(LAYERS)])
        self.norm = MarkedNorm(norm(WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # leaves the norms as they are; smaller where the residual adds up
                deep = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if deep else 0.02)

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
        model = GPT(vocabulary, NORMS[norm]).to(device, DTYPES[dtype])
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
        tqdm(total=steps, desc=f"{r.norm:19} {r.dtype}", position=i, disable=not terminal, unit="step")
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
    it starts; so a norm's nodes are those from its first operator's number up to the next operator's.
    A node's time includes adding its gradient to the residual branch's, which comes with every norm alike.
    """
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    spent: Callable[[Any], float] = lambda e: (e.device_time_total if cuda else e.cpu_time_total) / 1e6  # noqa: E731
    forward, nodes, inside, first = 0.0, set[int](), False, 0
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        in_mark = event.cpu_parent is not None and event.cpu_parent.name == "norm_forward"
        if in_mark:
            forward += spent(event)
            if not inside:
                inside, first = True, event.sequence_nr
        elif inside and event.cpu_parent is None and event.sequence_nr >= 0:
            nodes.update(range(first, event.sequence_nr))
            inside = False
            # A norm may follow at once
    backward = [e for e in events if e.name.startswith("autograd::engine::evaluate_function: ")]
    return forward + sum(spent(e) for e in backward if e.sequence_nr in nodes)
