"""How a call is timed: candidates in turn, the best sample of each, and how disturbed the machine was."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Collection, Mapping

Run = Callable[[], object]

SAMPLE_SECONDS = 1e-3  # short calls are timed in groups as long as this: the clock and the loop cost nothing
MIN_SAMPLES = 3
# A call as slow as this (eager RMSNorm over the largest shape) is not repeated for the sample count's sake.
SLOW_SECONDS = 0.3
# libgomp's threads spin for 300,000 turns after each parallel loop before they sleep.
SETTLE_SECONDS = 5e-3


def timed(run: Run, calls: int) -> float:
    """Seconds of one call, as the mean of so many."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def interruptions() -> int:
    """How often the system took a processor from this process for another one's sake."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def best_seconds(
    candidates: Mapping[str, Run], budget: float, settle: Collection[str] = ()
) -> dict[str, float]:
    """Each candidate's best sample. They take turns, so that a noisy moment hits all of them alike.

    A candidate leaves when it has used its share of the budget, and so a slow one does not eat the others'.
    Those in settle have a pool of threads of their own, and wait until the other pool's are asleep.
    """
    calls, best, spent, samples, least = {}, {}, {}, {}, {}
    for name, run in candidates.items():
        first = timed(run, 1)
        second = first if first > budget / 4 else timed(run, 1)  # a slow call needs no warm-up
        calls[name] = max(1, round(SAMPLE_SECONDS / second))
        best[name], spent[name], samples[name] = second, first + second, 0
        least[name] = 1 if second > SLOW_SECONDS else MIN_SAMPLES
    share = budget / len(candidates)
    turn = list(candidates)
    while turn:
        for name in list(turn):
            if name in settle:
                time.sleep(SETTLE_SECONDS)
            seconds = timed(candidates[name], calls[name])
            best[name] = min(best[name], seconds)
            spent[name] += seconds * calls[name]
            samples[name] += 1
            if spent[name] >= share and samples[name] >= least[name]:
                turn.remove(name)
        turn = turn[1:] + turn[:1]  # nobody always comes after the same one, and finds its caches
    return best


def keep_memory() -> bool:
    """Stops glibc's malloc from handing freed memory back; False where there is no such malloc.

    By default each large output comes in new pages, which cost up to five times the norm itself, and whether
    a middling one does depends on what was freed before: the same case then takes 0.7 ms or 5 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4  # the parameters' numbers in malloc.h
    return mallopt is not None and bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))
