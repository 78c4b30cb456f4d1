"""Norm warm-up: the part that norms take grows linearly over the first steps of training."""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusednorm.training.norms import is_ours

__all__ = ["NormWarmup"]

_TORCH_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def _is_norm(module: nn.Module) -> bool:
    """torch's norms, and those of this package that have an eps (AdaptiveNorm has a norm inside)."""
    ours = any(is_ours(kind) for kind in type(module).__mro__)
    return isinstance(module, _TORCH_NORMS) or (ours and hasattr(module, "eps"))


class _Schedule:
    """How far the warm-up is. Copies of a model (averaged weights) share it and so keep up with it."""

    def __init__(self, start_eps: float) -> None:
        self.start_eps = start_eps
        self.progress = 0.0  # of 1; a number, for Python
        self.finished = False
        self.weights: dict[torch.device, Tensor] = {}  # progress as a tensor: new values, no new graphs

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Schedule":
        return self


class _LambdaHook:
    """After a norm: ``lambda * norm(x) + (1 - lambda) * x``."""

    def __init__(self, schedule: _Schedule, device: torch.device) -> None:
        self.schedule, self.device = schedule, device

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if self.schedule.finished:  # in a copy, which keeps its hooks
            return None
        if isinstance(output, tuple):  # AddLayerNorm, AddRMSNorm: what they normalize is their other output
            output, x = output
            return self._blend(x, output), x
        return self._blend(args[0] if args else next(iter(kwargs.values())), output)

    def _blend(self, x: Tensor, output: Tensor) -> Tensor:
        wide = torch.promote_types(torch.promote_types(x.dtype, output.dtype), torch.float32)
        weight = self.schedule.weights[self.device].to(x.device, wide)
        return torch.lerp(x.to(wide), output.to(wide), weight).to(output.dtype)


class _EpsHook:
    """Around a norm: another eps for the time of the call, so that the module keeps its own."""

    def __init__(self, schedule: _Schedule, eps: float | None) -> None:
        self.schedule, self.eps = schedule, eps

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self.schedule.finished:
            final = torch.finfo(torch.float32).eps if self.eps is None else self.eps
            start = self.schedule.start_eps
            module.eps = start + (final - start) * self.schedule.progress  # type: ignore[assignment]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        module.eps = self.eps  # type: ignore[assignment]


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


class NormWarmup:
    r"""Lets the norms of a model come in over the first ``steps`` steps, stepped like a scheduler::

        warmup = fusednorm.NormWarmup(model, steps=1000)
        for batch in data:
            loss(model(batch)).backward()
            optimizer.step()
            warmup.step()

    With k steps taken, :math:`\lambda = k / \mathrm{steps}`:

    - mode "lambda": a norm gives :math:`\lambda \cdot \mathrm{norm}(x) + (1 - \lambda) \cdot x`, formed in
      fp32 (fp64 for fp64) and rounded once more;
    - mode "eps": a norm's eps goes linearly from ``start_eps`` to its own.

    Norms are torch's (Layer, RMS, Group, Batch, Instance) and this package's. They are changed by hooks, in
    training and evaluation alike, until the last step removes these: from then on nothing is left and nothing
    costs. Parameters, buffers and ``eps`` stay as they are; :class:`Residual` fuses again after the warm-up.
    Copies of the model made meanwhile (``copy.deepcopy``, averaged weights) follow the same schedule.

    Create it when the model is on its device; call ``step`` after backward. In a compiled model "lambda" is
    a tensor: it compiles once, and once more after the end. Each "eps" is a constant there, so that every
    step compiles anew until torch gives up: use "lambda". As torch takes no notice of hooks that come after
    compilation, what was compiled before is dropped (``torch.compiler.reset``) when hooks come or go.

    Args:
        model: has one norm or more.
        steps: of the warm-up; 0 does nothing at all.
        mode: "lambda" or "eps".
        start_eps: for "eps", what every norm's eps starts at, above their own; 1 by default.

    Raises:
        ValueError: no norm in the model, one that another warm-up still holds, or a value that does not fit.
    """

    __module__ = "fusednorm"  # what pickles call it

    def __init__(
        self, model: nn.Module, steps: int = 1000, mode: str = "lambda", *, start_eps: float | None = None
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ValueError(f"fusednorm.NormWarmup: steps: expected an integer of 0 or more, got {steps!r}")
        if mode not in ("lambda", "eps"):
            raise ValueError(f'fusednorm.NormWarmup: mode: expected "lambda" or "eps", got {mode!r}')
        if start_eps is not None and mode != "eps":
            raise ValueError(
                f'fusednorm.NormWarmup: start_eps: expected with mode "eps" only, got mode "{mode}"'
            )
        start_eps = 1.0 if start_eps is None else start_eps
        self._norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
        if not self._norms:
            raise ValueError(
                f"fusednorm.NormWarmup: model: expected one with norms of torch.nn or fusednorm, "
                f"got {type(model).__name__} without any"
            )
        for name, norm in self._norms.items():
            eps: Any = norm.eps
            if mode == "eps" and not (eps or 0.0) < start_eps < math.inf:
                raise ValueError(
                    f"fusednorm.NormWarmup: start_eps: expected a finite number above the eps of norm "
                    f"{name!r}, {eps}, got {start_eps}"
                )
            hooks = [getattr(hook, "__self__", hook) for hook in norm._forward_hooks.values()]
            if any(isinstance(h, (_LambdaHook, _EpsHook)) and not h.schedule.finished for h in hooks):
                raise ValueError(
                    f"fusednorm.NormWarmup: model: expected norms that are not warmed up yet, got {name!r}, "
                    "which another NormWarmup holds"
                )
        self.steps = steps
        self.mode = mode
        self.current_step = 0
        self._handles: list[RemovableHandle] = []
        self._schedule = _Schedule(start_eps)
        self._update()

    @property
    def finished(self) -> bool:
        """Whether all steps are taken and the model is as it was."""
        return self.current_step >= self.steps

    @property
    def progress(self) -> float:
        """The part of the steps taken, 0 to 1: what the formula calls lambda."""
        return 1.0 if self.finished else self.current_step / self.steps

    def step(self) -> None:
        """Takes one step; after the last one it does nothing."""
        if not self.finished:
            self.current_step += 1
            self._update()

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on from here, in plain numbers."""
        return {
            "steps": self.steps,
            "mode": self.mode,
            "start_eps": self._schedule.start_eps,
            "current_step": self.current_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was saved, whose steps replace this one's.

        Raises:
            ValueError: a state of another mode, or one that lacks an entry.
        """
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing or state_dict["mode"] != self.mode:
            got = f"one without {', '.join(missing)}" if missing else f"mode {state_dict['mode']!r}"
            raise ValueError(
                f"fusednorm.NormWarmup: state_dict: expected that of mode {self.mode!r}, got {got}"
            )
        self.steps = state_dict["steps"]
        self.current_step = state_dict["current_step"]
        self._schedule.start_eps = state_dict["start_eps"]
        self._update()

    def _update(self) -> None:
        schedule = self._schedule
        schedule.progress, schedule.finished = self.progress, self.finished
        for weight in schedule.weights.values():
            weight.fill_(self.progress)
        if self.finished == bool(self._handles):
            if self.finished:
                for handle in self._handles:
                    handle.remove()
                self._handles = []
            else:
                self._install()
            if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes seconds
                torch.compiler.reset()

    def _install(self) -> None:
        for norm in self._norms.values():
            if self.mode == "lambda":
                device = _device(norm)
                # fp64 holds every k / steps; the device has its own, so that no step waits for a copy.
                weight = torch.tensor(self.progress, dtype=torch.float64, device=device)
                self._schedule.weights.setdefault(device, weight)
                hook = _LambdaHook(self._schedule, device)
                self._handles.append(norm.register_forward_hook(hook, with_kwargs=True))
            else:
                eps: Any = norm.eps
                around = _EpsHook(self._schedule, eps)
                self._handles.append(norm.register_forward_pre_hook(around.enter))
                self._handles.append(norm.register_forward_hook(around.leave, always_call=True))
