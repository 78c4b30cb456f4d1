"""What fusednorm.NormMonitor adds to a training step: the demo's model with it and without, in turns.

Steps that are observed and others are timed apart, and put together for the default interval. What
the hooks cost in the others would drown in a step's noise, so it is timed on steps of one token. The losses
have to be the same to the bit. Under a minute on two cores.
"""

import statistics
import sys
from dataclasses import dataclass

import torch

import fusednorm
from demo import BATCH, CONTEXT, DTYPES, SEED, Corpus, Run, machine, read_text

EVERY, WARM_UP = 50, 3
NORM = "fusednorm.LayerNorm"


@dataclass
class Cost:
    """Medians in milliseconds: of a step without the monitor, and of what the monitor adds to it."""

    step: float
    added: float
    error: float


def compare(dtype: str, every: int, pairs: int, corpus: Corpus, tokens: int | None = None) -> Cost:
    batches = corpus.batches(corpus.train, SEED)
    plain, watched = (Run.start(NORM, dtype, len(corpus.alphabet), torch.device("cpu")) for _ in range(2))
    fusednorm.NormMonitor(watched.model, every=every)
    steps, added = [], []
    for pair in range(WARM_UP + pairs):
        ids, targets = next(batches)
        batch = (ids, targets) if tokens is None else (ids[:1, :tokens], targets[:1, :tokens])
        seconds = {}
        for run in (plain, watched) if pair % 2 else (watched, plain):
            loss, seconds[run is watched] = run.step(batch)
            run.losses.append(loss)
        if pair >= WARM_UP:
            steps.append(1e3 * seconds[False])
            added.append(1e3 * (seconds[True] - seconds[False]))
    if plain.losses != watched.losses:
        sys.exit(
            f"monitor_cost.py: {dtype}: the losses differ: {plain.losses} without, {watched.losses} with"
        )
    # The standard error of a median, from the distance of the quartiles of a normal distribution.
    low, _, high = statistics.quantiles(added, n=4)
    return Cost(statistics.median(steps), statistics.median(added), 1.25 * (high - low) / 1.35 / pairs**0.5)


def main() -> None:
    text = read_text(None)
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    ids = torch.tensor([number[character] for character in text])
    corpus = Corpus(alphabet, ids, ids)
    about = machine(torch.device("cpu"))
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}; steps of {BATCH} x {CONTEXT}")
    for dtype in DTYPES:
        observed = compare(dtype, 1, 25, corpus)
        others = compare(dtype, 10**9, 200, corpus, tokens=1)
        share = (observed.added + (EVERY - 1) * others.added) / EVERY / observed.step
        error = (observed.error + (EVERY - 1) * others.error) / EVERY / observed.step
        print(
            f"{dtype}: {observed.step:.1f} ms a step; an observed one {observed.added:+.2f} +- "
            f"{observed.error:.2f} ms, any other {others.added:+.3f} +- {others.error:.3f} ms; "
            f"with every={EVERY}: {share:+.2%} +- {error:.2%}"
        )


if __name__ == "__main__":
    main()
