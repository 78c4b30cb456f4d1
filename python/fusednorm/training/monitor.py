"""Watches what goes into a model's norms while it trains: statistics by dimension, gradients by depth.

Here are the hooks; ``statistics.py`` has what they feed, ``report.py`` what is read from it.
"""

import math
from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fusednorm.torch_support.recomputation import recomputing
from fusednorm.training import hooks
from fusednorm.training import report as reports
from fusednorm.training.norms import find_norms
from fusednorm.training.report import NormReport
from fusednorm.training.statistics import Sample, Watched

__all__ = ["NormMonitor"]


_Hook, _ignore = hooks.Hook, hooks.ignore  # what 0.1.0's pickles call them


class NormMonitor:
    r"""Watches the input of every norm in a model, on each ``every``-th training step.

    .. code:: python

        monitor = fusednorm.NormMonitor(model)
        train(model)
        print(monitor.table())
        monitor.plot("norms.png")

    Watched are ``torch.nn``'s norms and every module of this package that is called ``*Norm``; a norm inside
    one of those (an ``AdaptiveNorm``'s) is not watched apart. Of each it keeps

    - by dimension, over all observed steps: mean, standard deviation (over N) and largest magnitude of the
      input, merged exactly in fp64 (Chan, Golub and LeVeque 1979). A dimension is an element of
      ``normalized_shape``, a feature of column norms, a channel of norms that have channels second. Rows
      that a ``mask`` of this package's column norms leaves out are left out;
    - outlier dimensions: those whose standard deviation is ``outlier_ratio`` times the median over the
      dimensions or more, or so many times less;
    - by observed step: the norms of the weight, of its gradient after the backward pass, and of the loss's
      gradient with respect to the norm's input, whatever way it took: for a Pre-Norm the gradient of the
      residual stream at that depth. Several backward passes of a step add up as one long batch would.
      With a loss scaler, gradients are the scaled ones;
    - NaN and infinite values: counted by dimension, with the first *observed* step that had any, and left
      out of mean, deviation and magnitude. Gradient norms are shown as they are. ``every=1`` finds the very
      first step.

    **A step** is one forward pass of ``model`` itself, in training mode and with gradients enabled;
    evaluation, ``no_grad`` and calls of its parts are not observed. Where a step has several forward passes
    (gradient accumulation), say ``manual_steps=True`` and call :meth:`step` after each optimizer step. A
    forward pass that is repeated in backward (``torch.utils.checkpoint``, either kind) counts once.

    **Training is not changed**: the loss has the same bits, and no graph is kept alive. Norms have hooks in
    observed steps alone. A copy or a pickle of the model is not watched. In data-parallel training each
    process sees its own part of the batch.

    **torch.compile**: make the monitor before the first compiled call, for torch looks at hooks once. They
    are ordinary Python, so each norm breaks the graph, in steps that are not observed too and after
    :meth:`remove`, until the model is compiled anew (other graphs may round differently); ``fullgraph=True``
    is an error of torch's. CUDA graphs replay no hooks: norms inside one stay unseen.

    Args:
        model: the module that training calls.
        every: observe steps 0, every, 2 * every, ...
        outlier_ratio: how far from the median a deviation must be; more than 1.
        manual_steps: a step ends when :meth:`step` is called, not with the next forward pass.
        also: further classes of modules whose input is watched, as it is when they return, features last:
            norms of your own, or whole blocks for the gradient by depth.
        writer: an object with ``add_scalar(tag, value, step)``, such as TensorBoard's ``SummaryWriter``. An
            observed step is written when the next observed one starts, or by :meth:`remove`.

    Raises:
        ValueError: ``every`` or ``outlier_ratio`` out of range, or a model without norms.
        TypeError: a model that is no module, or a writer without ``add_scalar``.
        RuntimeError: in training, where a module's input changes its number of features.
    """

    __module__ = "fusednorm"  # what pickles call it

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        outlier_ratio: float = 10.0,
        manual_steps: bool = False,
        also: Sequence[type[nn.Module]] = (),
        writer: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise _error(TypeError, "model", "a torch.nn.Module", type(model).__name__)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise _error(ValueError, "every", "a whole number of 1 or more", repr(every))
        if not 1 < outlier_ratio < math.inf:
            raise _error(ValueError, "outlier_ratio", "a finite number above 1", repr(outlier_ratio))
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise _error(TypeError, "writer", "an object with add_scalar", type(writer).__name__)
        self.model, self.every, self.outlier_ratio = model, every, outlier_ratio
        self._manual, self._writer = manual_steps, writer
        self._watched = [Watched(*found) for found in find_norms(model, tuple(also))]
        if not self._watched:
            expected = "a model with a norm of torch.nn or fusednorm (name others' classes in also)"
            raise _error(ValueError, "model", expected, f"{type(model).__name__} without one")
        self._step = 0 if manual_steps else -1
        self._observing = manual_steps
        self._inside = False  # a training forward of the model
        self._norm_handles: list[Any] = []
        self._install()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_Hook(self._enter)),
            model.register_forward_hook(_Hook(self._leave), always_call=True),
        ]

    def _install(self) -> None:
        """The norms have hooks in observed steps alone: in the others they cost nothing and may be fused."""
        if not self._norm_handles:
            # Ahead of the model's own hook, where the model is a norm itself.
            self._norm_handles = [
                w.module.register_forward_hook(_Hook(self._see, w), with_kwargs=True, prepend=True)
                for w in self._watched
            ]

    def _uninstall(self) -> None:
        for handle in self._norm_handles:
            handle.remove()
        self._norm_handles = []

    @property
    def steps(self) -> int:
        """How many training steps there were, observed or not, the current one included."""
        return self._step + 1

    def step(self) -> None:
        """Ends a training step, where ``manual_steps`` was asked for."""
        if not self._manual:
            raise RuntimeError("fusednorm.NormMonitor.step: expected manual_steps=True, got False")
        self._advance()

    def _advance(self) -> None:
        self._step += 1
        self._observing = self._step % self.every == 0
        if self._observing:
            self._close()
            self._install()
        else:
            self._uninstall()

    def _close(self) -> None:
        # Not as the step ends: the backward pass may come after the next step's forward pass.
        for watched in self._watched:
            if self._writer is not None and watched.sample is not None:
                reports.write_scalars(self._writer, watched.name, watched.sample, self.outlier_ratio)
            watched.close()

    def _enter(self, *_: Any) -> None:
        if not recomputing():
            self._inside = (
                self.model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
            )
            if self._inside and not self._manual:
                self._advance()

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _see(self, watched: Watched, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        again = recomputing()
        if not (self._observing and (self._inside or again)):
            return
        source = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(source, Tensor) or source.is_nested or not source.is_floating_point():
            return
        if watched.sample is None:
            if again:
                return
            watched.sample = Sample(self._step)
            if watched.depth is None:
                watched.depth = sum(w.depth is not None for w in self._watched)
        watched.hook_weight(_Hook(self._see_weight_gradient, watched))
        watched.see(source, again, args, kwargs, output)

    def _see_weight_gradient(self, watched: Watched, weight: Tensor) -> None:
        sample = watched.sample
        if sample is None or weight.grad is None:  # an optimizer inside backward may have taken it
            return
        if self._observing or sample.weight_grad_norm is None:
            sample.see_weight_gradient(weight.grad)

    def report(self) -> list[NormReport]:
        """What was seen of each norm, in the order of the forward pass; norms that never ran come last."""
        last = len(self._watched)
        ordered = sorted(self._watched, key=lambda w: last if w.depth is None else w.depth)
        return [
            NormReport.make(w.name, type(w.module).__name__, *w.totals(), self.outlier_ratio) for w in ordered
        ]

    def table(self) -> str:
        """The report as aligned text: a line for each norm, then outlier dimensions and non-finite values."""
        return reports.table(self.report(), self.steps, self.every)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws deviations by layer and dimension, and gradient norms by depth, into an image file.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: nothing was observed yet.
        """
        reports.plot(self.report(), path)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes the whole report as JSON; NaN and infinity, which JSON lacks, as null."""
        reports.to_json(self.report(), self.steps, self.every, path)

    def remove(self) -> None:
        """Takes the hooks off the model; what was seen can still be read. Further calls do nothing."""
        self._uninstall()
        for handle in self._handles:
            handle.remove()
        for watched in self._watched:
            watched.unhook_weight()
        self._handles = []
        self._observing = self._inside = False
        self._close()

    def __enter__(self) -> "NormMonitor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _error(kind: type[Exception], argument: str, expected: str, given: str) -> Exception:
    return kind(f"fusednorm.NormMonitor: {argument}: expected {expected}, got {given}")
