"""Things people say of norms that cost little to measure: gradients in deep stacks, BatchNorm and padding."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm
from demo import CONTEXT, EPS, GPT, SEED, TAIL, Corpus
from gallery_variants import demo_rate

DEPTH, STACK_WIDTH, STACK_ROWS = 32, 64, 256
FAR = 10  # layers from the output: "exponentially from about 10 layers on"
IGNORED = -100  # cross_entropy leaves these targets out

STACKS: dict[str, Callable[[Tensor, nn.Module, nn.Module], Tensor]] = {
    "F(x)": lambda x, f, norm: f(x),
    "F(norm(x))": lambda x, f, norm: f(norm(x)),
    "x + F(x)": lambda x, f, norm: x + f(x),
    "x + F(norm(x))": lambda x, f, norm: x + f(norm(x)),
    "norm(x + F(x))": lambda x, f, norm: norm(x + f(x)),
}
INITIALISATIONS = ("torch's default", "He")


class Stage(nn.Module):
    """A feed-forward layer of a stack, put together as one of STACKS."""

    def __init__(self, kind: str, initialisation: str) -> None:
        super().__init__()
        self.combine = STACKS[kind]
        self.f = nn.Sequential(
            nn.Linear(STACK_WIDTH, 4 * STACK_WIDTH), nn.GELU(), nn.Linear(4 * STACK_WIDTH, STACK_WIDTH)
        )
        self.norm = fusednorm.LayerNorm(STACK_WIDTH, eps=EPS)
        if initialisation == "He":
            for linear in self.f[0], self.f[2]:
                nn.init.kaiming_normal_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(x, self.f, self.norm)


def deep_gradients(depth: int = DEPTH) -> list[dict[str, Any]]:
    """Norms of the gradient at each layer's input, before any training; the slope of their logarithm.

    The loss is the output's product with random numbers: the gradient at the output is the same for all.
    """
    found = []
    for initialisation in INITIALISATIONS:
        for kind in STACKS:
            torch.manual_seed(SEED)
            stack = nn.Sequential(*[Stage(kind, initialisation) for _ in range(depth)])
            x, weights = torch.randn(2, STACK_ROWS, STACK_WIDTH)
            with fusednorm.NormMonitor(stack, every=1, also=(Stage,)) as monitor:
                (stack(x.requires_grad_()) * weights).sum().backward()
            reports = {report.name: report for report in monitor.report() if report.kind == "Stage"}
            norms = [reports[str(layer)].last("input_grad_norm") for layer in range(depth)]
            found.append(
                {"stack": kind, "initialisation": initialisation, "gradient_norms": norms} | slope(norms)
            )
    return found


def slope(norms: list[float]) -> dict[str, float | None]:
    """The factor by which a gradient changes from layer to layer on its way back, FAR layers from the output
    and further, and how well one such factor describes it (R squared of the logarithm's line)."""
    logs = [math.log(norm) for norm in norms[: len(norms) - FAR] if 0 < norm < math.inf]
    if len(logs) < 3:
        return {"factor_per_layer": None, "r_squared": None}
    line = statistics.linear_regression(range(len(logs)), logs)
    spread = statistics.pvariance(logs)
    residual = statistics.fmean((y - line.slope * i - line.intercept) ** 2 for i, y in enumerate(logs))
    # Towards the input the layer's number falls.
    return {"factor_per_layer": math.exp(-line.slope), "r_squared": 1 - residual / spread if spread else 1.0}


class Masked(nn.Module):
    """Hands a norm the mask of the batch that is under way."""

    def __init__(self, norm: nn.Module, masks: dict[str, Tensor]) -> None:
        super().__init__()
        self.norm, self.masks = norm, masks

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.masks["now"])


def padded(corpus: Corpus, part: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of texts of random length, filled up with a character of its own: ids, targets, mask."""
    generator = torch.Generator().manual_seed(seed)
    for ids, targets in corpus.batches(part, seed):
        lengths = torch.randint(CONTEXT // 8, CONTEXT + 1, (len(ids), 1), generator=generator)
        mask = torch.arange(CONTEXT) < lengths
        yield ids.where(mask, len(corpus.alphabet)), targets.where(mask, IGNORED), mask


def padding(
    corpus: Corpus, steps: int, layers: int, width: int, validations: int = 8
) -> list[dict[str, Any]]:
    """Trains on padded text; compares the loss in training with the one in validation."""
    found, masks = [], dict[str, Tensor]()
    norms: dict[str, Callable[[int], nn.Module]] = {"LayerNorm": lambda n: fusednorm.LayerNorm(n, eps=EPS)}
    if hasattr(fusednorm, "BatchNorm"):
        norms["BatchNorm, padding counted in"] = lambda n: fusednorm.BatchNorm(n, eps=EPS)
        norms["BatchNorm, with a mask"] = lambda n: Masked(fusednorm.BatchNorm(n, eps=EPS), masks)

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, targets, masks["now"] = batch
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def validate(model: nn.Module) -> float:
        batches = padded(corpus, corpus.val, SEED)
        with torch.no_grad():
            return statistics.fmean(loss_of(model, next(batches)).item() for _ in range(validations))

    for name, norm in norms.items():
        torch.manual_seed(SEED)
        model = GPT(len(corpus.alphabet) + 1, norm, layers=layers, width=width)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batches, losses = padded(corpus, corpus.train, SEED), []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = demo_rate(step, steps)
            optimizer.zero_grad()
            loss = loss_of(model, next(batches))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        twin = copy.deepcopy(model)  # in training mode a validation moves the running averages
        train, val = statistics.fmean(losses[-min(TAIL, max(steps // 4, 1)) :]), validate(model.eval())
        found.append(
            {"norm": name, "train_loss": train, "val_loss": val, "gap": val / train - 1,
             "val_loss_in_training_mode": validate(twin), "losses": losses}
        )  # fmt: skip
    return found


def single_sample() -> str | None:
    """What BatchNorm says to a batch of one in training mode; None where there is no BatchNorm."""
    if not hasattr(fusednorm, "BatchNorm"):
        return None
    try:
        fusednorm.BatchNorm(4)(torch.ones(1, 4))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"
