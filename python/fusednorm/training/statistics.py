"""What :class:`fusednorm.NormMonitor` keeps of a norm: statistics of columns, a step's numbers, totals."""

import math
from array import array
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fusednorm.training.norms import features_of, is_ours

__all__ = ["SERIES", "ColumnStatistics", "Sample", "Watched", "features_of", "is_ours"]

SERIES = (
    "step",
    "largest",
    "weight_norm",
    "weight_grad_norm",
    "input_grad_norm",
    "nonfinite_input",
    "nonfinite_grad",
)
"""A norm's numbers by observed step."""

# Elements widened to fp64 at a time: 2 MB stay in cache. 1024 x 256 fp32 take 0.8 ms on two cores at 2**17 to
# 2**19, 1.5 ms at 2**21; 4096 x 4096 take 36 ms and 75 ms.
_CHUNK = 1 << 18


class ColumnStatistics:
    """Count, mean, sum of squared deviations and largest magnitude of each column, all in fp64.

    A chunk's deviations are about its own mean, and chunks merge by the formula of Chan, Golub and LeVeque
    (1979): nothing cancels, however far the mean is from 0. Values that are NaN or infinite are counted by
    column and left out of the rest.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        self.count, self.mean, self.squares, self.largest = torch.zeros(
            4, columns, dtype=torch.float64, device=device
        ).unbind()
        self.nonfinite = torch.zeros(columns, dtype=torch.int64, device=device)

    def add(self, rows: Tensor, mask: Tensor | None = None) -> None:
        """Takes in ``rows`` of shape ``[rows, columns]``; of a row where ``mask`` is False, nothing."""
        size = max(1, _CHUNK // rows.shape[1])
        masks = [None] * len(rows) if mask is None else torch.split(mask[:, None], size)
        for part, real in zip(torch.split(rows, size), masks, strict=False):
            x = part.double()
            valid = x.isfinite() if real is None else x.isfinite() & real
            total = len(part) if real is None else real.sum()
            x = x.where(valid, 0.0)
            chunk = ColumnStatistics.__new__(ColumnStatistics)
            chunk.count = valid.sum(0, dtype=torch.float64)
            chunk.nonfinite = (total - chunk.count).long()
            chunk.mean = x.sum(0) / chunk.count.clamp_min(1)
            chunk.largest = x.abs().amax(0)
            chunk.squares = (x - chunk.mean).where(valid, 0.0).square().sum(0)
            self.merge(chunk)

    def merge(self, other: "ColumnStatistics") -> None:
        """Takes in all that ``other`` has seen."""
        device = self.count.device
        count, mean = other.count.to(device), other.mean.to(device)
        total = self.count + count
        share = count / total.clamp_min(1)
        apart = mean - self.mean
        self.squares = self.squares + other.squares.to(device) + apart.square() * (self.count * share)
        self.mean = self.mean + apart * share
        self.count = total
        self.largest = torch.maximum(self.largest, other.largest.to(device))
        self.nonfinite = self.nonfinite + other.nonfinite.to(device)

    def std(self) -> Tensor:
        """The standard deviation over all values (N in the denominator); NaN where there were none."""
        return (self.squares / self.count).sqrt()

    def largest_of_all(self) -> float:
        """The largest magnitude in any column; NaN where there were no values."""
        return float(self.largest.max()) if self.count.any() else math.nan


def _merged(first: ColumnStatistics | None, second: ColumnStatistics | None) -> ColumnStatistics | None:
    """Both together, in a new object where both are there."""
    if first is None or second is None:
        return first or second
    both = ColumnStatistics(len(second.count), second.count.device)
    both.merge(first)
    both.merge(second)
    return both


def _norm_of(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm


class Sample:
    """What a norm showed in one observed step, summed over the step's forward and backward passes."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.graph_follows = False  # the forward pass had none, and is to be repeated
        self.columns: ColumnStatistics | None = None
        self.weight_norm: Tensor | None = None
        self.weight_grad_norm: Tensor | None = None
        self.input_grad_square: Tensor | None = None
        self.nonfinite_grad: Tensor | None = None

    def see_input(self, rows: Tensor, mask: Tensor | None) -> None:
        if self.columns is None:
            self.columns = ColumnStatistics(rows.shape[1], rows.device)
        self.columns.add(rows, mask)

    def see_gradient(self, grad: Tensor) -> None:
        """A hook for autograd: keeps numbers, not ``grad``, and changes nothing."""
        with torch.no_grad(), _disable_current_modes():
            square = torch.linalg.vector_norm(grad, dtype=torch.float64).square()
            nonfinite = grad.numel() - grad.isfinite().sum()
            if self.input_grad_square is not None and self.nonfinite_grad is not None:
                square, nonfinite = self.input_grad_square + square, self.nonfinite_grad + nonfinite
            self.input_grad_square, self.nonfinite_grad = square, nonfinite

    def see_weight(self, weight: Tensor) -> None:
        self.weight_norm = _norm_of(weight)

    def see_weight_gradient(self, grad: Tensor) -> None:
        with torch.no_grad(), _disable_current_modes():
            self.weight_grad_norm = _norm_of(grad)

    def numbers(self) -> dict[str, float]:
        """The next entry of each of SERIES; NaN where there is no number. Waits for the device."""

        def number(value: Tensor | None) -> float:
            return math.nan if value is None else float(value)

        columns = self.columns
        return {
            "step": self.step,
            "largest": math.nan if columns is None else columns.largest_of_all(),
            "weight_norm": number(self.weight_norm),
            "weight_grad_norm": number(self.weight_grad_norm),
            "input_grad_norm": math.sqrt(number(self.input_grad_square)),
            "nonfinite_input": 0 if columns is None else int(columns.nonfinite.sum()),
            "nonfinite_grad": 0 if self.nonfinite_grad is None else int(self.nonfinite_grad),
        }


class Watched:
    """One norm: where its features are, and what was seen of it."""

    def __init__(self, name: str, module: nn.Module, features: str) -> None:
        self.name = name or type(module).__name__
        self.module = module
        self.features = features
        # The norm in an Add*Norm works on the sum, its second output. The gradient of the sum is that of
        # the first input, which enters the sum with a factor of 1.
        self.adds = any(is_ours(cls) and cls.__name__.startswith("Add") for cls in type(module).__mro__)
        self.depth: int | None = None  # its place in the first forward pass that was observed
        self.sample: Sample | None = None  # the step observed last; the steps before it are in the next two
        self.columns: ColumnStatistics | None = None
        self.series = {key: array("d") for key in SERIES}
        self.dims: int | None = None
        self.hooked_weight: Tensor | None = None
        self.weight_handle: Any = None

    def weight(self) -> Tensor | None:
        named = (getattr(self.module, name, None) for name in ("weight", "g"))
        return next((value for value in named if isinstance(value, Tensor)), None)

    def hook_weight(self, hook: Any) -> None:
        """Hangs ``hook`` on the weight's gradient, once."""
        # Here and not at the start: parameters may be replaced, or made trainable, later.
        weight = self.weight()
        if weight is self.hooked_weight or weight is None or not (weight.requires_grad and weight.is_leaf):
            return
        self.unhook_weight()
        self.hooked_weight = weight
        self.weight_handle = weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def unhook_weight(self) -> None:
        if self.weight_handle is not None:
            self.weight_handle.remove()
        self.hooked_weight = self.weight_handle = None

    def rows(self, x: Tensor) -> Tensor:
        """The input as ``[rows, features]``."""
        if self.features == "last":
            x = x.reshape(-1, math.prod(getattr(self.module, "normalized_shape", x.shape[-1:])))
        else:
            unbatched = getattr(self.module, "_get_no_batch_dim", None)  # torch's InstanceNorm: [C, L], too
            channels = 0 if unbatched is not None and unbatched() == x.dim() else 1
            x = x.movedim(channels, -1).flatten(0, -2)
        if self.dims not in (None, x.shape[1]):
            raise RuntimeError(
                f"fusednorm.NormMonitor: {self.name}: expected an input with {self.dims} features, "
                f"as before, got {x.shape[1]}"
            )
        self.dims = x.shape[1]
        return x

    def see(self, source: Tensor, recomputing: bool, args: Any, kwargs: Any, output: Any) -> None:
        """Takes a forward pass, with the input ``source``, into the sample."""
        assert self.sample is not None
        sample, graph = self.sample, torch.is_grad_enabled()
        if not recomputing and not graph:
            sample.graph_follows = True  # reentrant checkpointing: with the recomputation
        elif source.requires_grad and graph and (not recomputing or sample.graph_follows):
            source.register_hook(sample.see_gradient)  # type: ignore[no-untyped-call]
        if not recomputing and source.numel() > 0:
            # Selective checkpointing replays what operators it sees: it must not see these.
            with torch.no_grad(), _disable_current_modes():
                x = output[1] if self.adds else source
                sample.see_input(self.rows(x.detach()), _mask(x, args, kwargs))
                weight = self.weight()
                if weight is not None:
                    sample.see_weight(weight)

    def close(self) -> None:
        """Adds the step observed last to those before it."""
        if self.sample is not None:
            for key, value in self.sample.numbers().items():
                self.series[key].append(value)
            self.columns = _merged(self.columns, self.sample.columns)
            self.sample = None

    def totals(self) -> tuple[ColumnStatistics | None, dict[str, list[float]]]:
        """Statistics and series of all observed steps."""
        series = {key: list(values) for key, values in self.series.items()}
        columns = self.columns
        if self.sample is not None:
            for key, value in self.sample.numbers().items():
                series[key].append(value)
            columns = _merged(columns, self.sample.columns)
        return columns, series


def _mask(x: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """The rows that are real, for a norm that was given a padding mask."""
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:-1]:
        return mask.reshape(-1)
    return None
