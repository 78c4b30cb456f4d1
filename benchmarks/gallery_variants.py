"""What the gallery trains: one entry for each norm, each placement and each way to start training.

An entry names what it needs of fusednorm; where that is missing, the gallery says so and goes on without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusednorm
from demo import EPS, GPT, LEARNING_RATE, SEED, WARMUP, PreNorm

HARD_RATE = 3 * LEARNING_RATE  # and at once, without warm-up of the learning rate
NORMS, PLACEMENTS, STARTS = "norms", "placements", "hard start"
GROUPS = {
    NORMS: "norms, before each sublayer (Pre-Norm)",
    PLACEMENTS: "placements, of LayerNorm",
    STARTS: f"a hard start (learning rate {HARD_RATE:g} at once)",
}


def demo_rate(step: int, steps: int) -> float:
    """The demo's learning rate: up, in a short run sooner, and then down to a tenth."""
    return LEARNING_RATE * min((step + 1) / min(WARMUP, steps / 4), 1.0) * (1 - 0.9 * step / steps)


class ByToken(nn.Module):
    """A norm of [samples, channels] for [batch, positions, channels]: each token is a sample."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def of_ours(name: str, **options: Any) -> Callable[[int], nn.Module]:
    return lambda width: getattr(fusednorm, name)(width, **options)


def group_norm(width: int) -> nn.Module:
    return ByToken(fusednorm.GroupNorm(4, width, eps=EPS))


def adaptive_norm(width: int) -> nn.Module:
    return fusednorm.AdaptiveNorm(fusednorm.LayerNorm(width, eps=EPS))


@dataclass(frozen=True)
class Variant:
    """A model of the gallery, and how it is trained."""

    name: str
    norm: Callable[[int], nn.Module]
    placement: str = "pre"
    groups: tuple[str, ...] = (NORMS,)
    needs: tuple[str, ...] = ()
    warmup: str | None = None  # NormWarmup's mode
    hard: bool = False
    attention: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> list[str]:
        return [name for name in self.needs if not hasattr(fusednorm, name)]

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a step: the demo's, or HARD_RATE at once."""
        return HARD_RATE * (1 - 0.9 * step / steps) if self.hard else demo_rate(step, steps)

    def build(self, vocabulary: int, layers: int, width: int) -> GPT:
        torch.manual_seed(SEED)
        place: Any = PreNorm
        if self.placement != "pre":
            alpha = (2 * layers) ** 0.25 if self.placement == "deep" else None
            place = partial(fusednorm.Residual, placement=self.placement, alpha=alpha)
        final = self.placement in ("pre", "sandwich")  # the others end with a norm anyway
        model = GPT(vocabulary, self.norm, place, layers=layers, width=width, final=final, **self.attention)
        if self.placement == "deep":
            fusednorm.deepnorm_init(model, layers)
        return model


def residual_classes() -> tuple[type[nn.Module], ...]:
    """The modules whose inputs are the residual stream, in whatever placement."""
    return (PreNorm, *([fusednorm.Residual] if hasattr(fusednorm, "Residual") else []))


layer_norm, rms_norm = of_ours("LayerNorm", eps=EPS), of_ours("RMSNorm", eps=EPS)
annotated = of_ours("LayerNorm", eps=1e-6, eps_outside=True, unbiased=True)  # the teaching code's eps
place_needs = ("Residual",)
started = partial(Variant, groups=(STARTS,), hard=True)

VARIANTS: Sequence[Variant] = [
    Variant("no norm", lambda _: nn.Identity()),
    Variant("LayerNorm", layer_norm, groups=(NORMS, PLACEMENTS)),
    Variant("LayerNorm, annotated", annotated),
    Variant("RMSNorm", rms_norm),
    Variant("RMSNorm, llama mode", of_ours("RMSNorm", eps=EPS, casting_mode="llama")),
    Variant("RMSNorm, weight offset 1", of_ours("RMSNorm", eps=EPS, weight_offset=1.0)),
    Variant("RMSNorm, and of q and k", rms_norm, attention={"qk_norm": rms_norm}),
    Variant("ScaleNorm", of_ours("ScaleNorm"), needs=("ScaleNorm",)),
    Variant("GroupNorm, 4 groups", group_norm, needs=("GroupNorm",)),
    Variant("AdaptiveNorm", adaptive_norm, needs=("AdaptiveNorm",)),
    Variant("BatchNorm", of_ours("BatchNorm", eps=EPS), needs=("BatchNorm",)),
    # Its own default of 10000 warm-up steps would never let it be itself here.
    Variant("PowerNorm", of_ours("PowerNorm", eps=EPS, warmup_iters=WARMUP), needs=("PowerNorm",)),
    Variant("LayerNorm, post", layer_norm, "post", (PLACEMENTS,), place_needs),
    Variant("LayerNorm, sandwich", layer_norm, "sandwich", (PLACEMENTS,), place_needs),
    Variant("LayerNorm, deep", layer_norm, "deep", (PLACEMENTS,), (*place_needs, "deepnorm_init")),
    started("hard: LayerNorm", layer_norm),
    started("hard: gain of 0.1", of_ours("LayerNorm", eps=EPS, init_gain=0.1)),
    started("hard: input scale 0.02", of_ours("LayerNorm", eps=EPS, input_scale=0.02)),
    started("hard: norm warm-up, lambda", layer_norm, needs=("NormWarmup",), warmup="lambda"),
    started("hard: norm warm-up, eps", layer_norm, needs=("NormWarmup",), warmup="eps"),
    started("hard: LayerNorm, post", layer_norm, "post", needs=place_needs),
    started("hard: LayerNorm, deep", layer_norm, "deep", needs=(*place_needs, "deepnorm_init")),
]
