"""What a case times: ours, torch eager, torch.compile, ONNX Runtime, the limit; and the check before it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm
from shapes import (
    ADD_LAYER_NORM,
    BACKWARD,
    DTYPES,
    FORWARD,
    MODULE_DIRECTIONS,
    NORM_PARAMETERS,
    NORM_TITLES,
    Case,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import reference  # noqa: E402  (the tests' float64 formulas, which no package installs)

EPS = 1e-5
CHECK_ROWS = 64
MAX_ULPS = 4.0
# Others are checked for computing the same thing at all, by a part of the row's largest value: ONNX Runtime's
# sums over 65536 columns are off by 79 ulps.
MAX_ERROR_OTHERS = 0.02

Run = Callable[[], Any]
Norm = Callable[..., Tensor]


class Inputs(NamedTuple):
    """What one case computes on. The parameters are of x's dtype, as in a model cast as a whole."""

    x: Tensor
    other: Tensor  # the incoming gradient, or the residual that is added
    parameters: tuple[Tensor, ...]

    def head(self, rows: int) -> Inputs:
        """The first rows alone, apart from this one's autograd graph."""
        parameters = tuple(p.detach().requires_grad_() for p in self.parameters)
        return Inputs(self.x.detach()[:rows].requires_grad_(), self.other[:rows], parameters)


@functools.lru_cache(maxsize=1)
def make_inputs(norm: str, rows: int, cols: int, dtype: str) -> Inputs:
    """Normal inputs from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPES[dtype])

    parameters = tuple(normal(cols).requires_grad_() for _ in range(NORM_PARAMETERS[norm]))
    return Inputs(normal(rows, cols).requires_grad_(), normal(rows, cols), parameters)


def forward_run(norm: str, function: Norm, inputs: Inputs) -> Run:
    """A call that gives the output. The caller sets the grad mode."""
    x, other, parameters = inputs
    shape = list(x.shape[-1:])
    if norm == ADD_LAYER_NORM:
        return lambda: function(x + other, shape, *parameters, EPS)
    return lambda: function(x, shape, *parameters, EPS)


def gradients_run(forward: Run, inputs: Inputs) -> Run:
    """Forward, and the gradients of x and of the parameters."""
    wanted, grad = (inputs.x, *inputs.parameters), inputs.other
    return lambda: torch.autograd.grad(forward(), wanted, grad)


def backward_run(forward: Run, inputs: Inputs) -> Run:
    """The gradients alone, over a graph built here."""
    wanted, grad, output = (inputs.x, *inputs.parameters), inputs.other, forward()
    return lambda: torch.autograd.grad(output, wanted, grad, retain_graph=True)


def module_run(case: Case, module: type[nn.Module], inputs: Inputs) -> Run:
    """A module's call, with the inputs' own parameters in it."""
    norm, x, grad = module(case.cols, EPS), inputs.x, inputs.other
    for name, parameter in zip(("weight", "bias"), inputs.parameters, strict=False):
        setattr(norm, name, nn.Parameter(parameter.detach()))
    if not case.backward:
        return lambda: norm(x)
    wanted = (x, *norm.parameters())
    return lambda: torch.autograd.grad(norm(x), wanted, grad)


def limit_run(case: Case, inputs: Inputs) -> Run:
    """Moves the bytes that the case must move into fresh memory, and computes nothing."""
    x, other = inputs.x.detach(), inputs.other
    if case.direction == BACKWARD or case.norm == ADD_LAYER_NORM:
        return lambda: torch.add(x, other)
    return (lambda: (x.clone(), torch.add(x, other))) if case.backward else x.clone


def _directed(case: Case, function: Norm, inputs: Inputs) -> Run:
    forward = forward_run(case.norm, function, inputs)
    if not case.backward:
        return forward
    return (backward_run if case.direction == BACKWARD else gradients_run)(forward, inputs)


def _names(norm: str) -> tuple[Norm, Norm]:
    name = "layer_norm" if norm == ADD_LAYER_NORM else norm
    return getattr(fusednorm.functional, name), getattr(F, name)


def candidates(case: Case, inputs: Inputs, compiled: bool) -> dict[str, Run]:
    """Every candidate of a case by name, ready to be called."""
    ours, eager = _names(case.norm)
    if case.direction in MODULE_DIRECTIONS:
        name = NORM_TITLES[case.norm]  # both packages name their modules so
        packages = {"ours": fusednorm, "eager": nn}
        return {who: module_run(case, getattr(package, name), inputs) for who, package in packages.items()}
    found = {"ours": _directed(case, ours, inputs), "eager": _directed(case, eager, inputs)}
    if compiled:
        torch._dynamo.reset()  # each case compiles for its own shape and thread count

        def formula(x: Tensor, shape: list[int], *rest: Any) -> Tensor:
            return eager(x, shape, *rest)

        found["compile"] = _directed(case, torch.compile(formula, dynamic=False), inputs)
    if case.direction == FORWARD:
        import onnx_candidates

        run = onnx_candidates.forward(case, inputs.x, inputs.other, inputs.parameters, EPS)
        if run is not None:
            found["onnxruntime"] = run
    found["limit"] = limit_run(case, inputs)
    return found


def gradient_terms(norm: str, inputs: Inputs, eps: float) -> list[Tensor]:
    """How large the terms of each gradient's sums are.

    Where they cancel, as in rows of one column, the rounding of a sum is that of its terms.
    """
    x, g, w = inputs.x.detach().double(), inputs.other.double(), inputs.parameters[0].detach().double()
    centered = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
    rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    return [(g * w).abs() * rstd, (g * centered * rstd).abs().sum(0), g.abs().sum(0)]


def ulps_of_terms(actual: Tensor, expected: Tensor, terms: Tensor) -> float:
    """The largest error in ulps of the row's largest value or term."""
    largest = torch.maximum(expected.abs(), terms).amax(-1, keepdim=True).clamp_min(1e-300)
    ulp = largest.log2().floor().exp2() * reference.unit(actual.dtype)
    return float(((actual.double() - expected).abs() / ulp).max())


def check(case: Case, inputs: Inputs, runs: dict[str, Run]) -> dict[str, float]:
    """Raises where the first rows of ours differ from the float64 formulas by over 4 ulps.

    The other candidates' outputs are held to the same numbers, loosely: they must compute the same thing.
    Returns each candidate's error in ulps, of a forward.
    """
    few = inputs.head(CHECK_ROWS)
    ours, _ = _names(case.norm)
    # A gradient has its leaf's dtype, and rounded ones are no reference: the leaves are doubles.
    doubles = [t.detach().double().requires_grad_() for t in (few.x, *few.parameters)]
    first, norm = doubles[0], case.norm
    if norm == ADD_LAYER_NORM:  # the sum is rounded, as in all candidates
        norm, first = "layer_norm", (few.x + few.other).detach().double()
    with torch.enable_grad():
        output = getattr(reference, norm)(first, *doubles[1:], eps=EPS)
        forward = forward_run(case.norm, ours, few)
        errors = {"output": reference.ulps(forward(), output)}
        if case.backward:
            names = ("gradient of x", "gradient of the weight", "gradient of the bias")
            expected = torch.autograd.grad(output, doubles, few.other.double())
            terms = gradient_terms(norm, few, EPS)
            for name, a, e, t in zip(names, gradients_run(forward, few)(), expected, terms, strict=False):
                errors[name] = ulps_of_terms(a, e, t)
    for what, error in errors.items():
        if not error <= MAX_ULPS:
            raise RuntimeError(f"{case}: the {what} is off by {error:.1f} ulp (at most {MAX_ULPS:g} allowed)")
    found: dict[str, float] = {}
    for candidate, run in runs.items() if case.direction == FORWARD else ():
        if candidate == "limit":
            continue
        result = run()
        result = result if isinstance(result, Tensor) else torch.from_numpy(result())
        error = reference.ulps(result[:CHECK_ROWS], output)
        if not error * reference.unit(result.dtype) <= MAX_ERROR_OTHERS:
            raise RuntimeError(f"{case}: {candidate}'s output is off by {error:.0f} ulp")
        found[candidate] = round(error, 2)
    return found
