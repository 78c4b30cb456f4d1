"""Activation checkpointing as a norm with state must see it: a forward that runs again inside a backward.

``torch.utils.checkpoint`` (both kinds) and its like run a forward a second time while the backward is in
progress. That second run must not update running statistics again, and must see those of the first run,
which other forwards may have moved on since.
"""

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Run", "Runs", "recomputing"]


def recomputing() -> bool:
    """Whether a backward is in progress, so that a forward now is a recomputation. Unknown when compiling."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class Run:
    """A forward in training, as a recomputation needs it."""

    batch: Tensor  # the statistic of its batch, by which it is known again
    used: Tensor  # the statistic that it normalized by
    has_graph: bool  # False: a reentrant checkpoint's, or nobody wants a gradient
    sequence: int = 0  # the number of its node among all of autograd's


class Runs:
    """The forwards of a module that may run again.

    One with a graph is remembered while the graph lives (its node is to hold the ``Run``); of those without,
    and of those whose output was dropped, the last ``KEPT``.
    """

    KEPT = 64

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Run] = weakref.WeakSet()
        self._kept: deque[Run] = deque(maxlen=self.KEPT)

    def __reduce__(self) -> tuple[type["Runs"], tuple[()]]:
        return Runs, ()  # a copy of a module has run nothing

    def first(self, batch: Tensor, used: Tensor) -> Run:
        """A forward that is no recomputation."""
        run = Run(batch, used, torch.is_grad_enabled())
        self._known.add(run)
        self._kept.append(run)
        return run

    def again(self, batch: Tensor, name: str) -> Run:
        """A recomputation of the forward whose batch had this statistic, up to rounding. Waits for a GPU.

        What identifies a forward is its data, since nothing else reaches a recomputation under every kind
        of checkpointing. Forwards over equal data are told apart by their place in the graph.
        """
        known = [run for run in self._known if run.batch.shape == batch.shape]
        distances = [1.0]
        if known:
            past = torch.stack([run.batch for run in known])
            same = (past == batch) | (past.isnan() & batch.isnan())
            distance = (past - batch).abs() / (past.abs() + batch.abs())
            distance = torch.where(same, 0.0, distance.nan_to_num(1.0))
            distances = distance.amax(1).tolist()
        nearest = min(distances)
        if nearest > 1e-2:  # kernels without a fixed order of sums stay far below
            raise RuntimeError(
                f"fusednorm.{name}: a forward inside a backward is taken for a checkpoint's recomputation, "
                f"but is none of the forwards remembered: those whose graph lives and the last {self.KEPT}. "
                "Recompute with the same random numbers, or keep the module out of the checkpoint"
            )
        equals = [run for run, distance in zip(known, distances, strict=True) if distance == nearest]
        first = min(equals, key=_gap)
        run = Run(first.batch, first.used, torch.is_grad_enabled())
        self._known.add(run)  # for checkpoints in checkpoints
        if not run.has_graph:
            self._kept.append(run)
        return run


def _gap(run: Run) -> float:
    """How far a forward ran from the node that now runs, on the side where its checkpoint would be.

    A reentrant checkpoint is a node, made before its forward runs without a graph. The other kind recomputes
    when the first of the nodes that its forward made wants its tensors: backward comes to the last one first.
    """
    node = torch._C._current_autograd_node()
    gap = 0 if node is None else node._sequence_nr() - run.sequence
    gap = gap if run.has_graph else -gap
    return gap if gap >= 0 else float("inf")
