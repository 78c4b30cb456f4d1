"""What a case times: ours, torch eager, torch.compile, ONNX Runtime, the limit; and the check before it.

Of the residual add, also ours in two steps: torch's add and our norm.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm
from shapes import (
    ADD_TITLES,
    BACKWARD,
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
Norm = Callable[..., Any]


class Inputs(NamedTuple):
    """What one case computes on. The parameters are of x's dtype, as in a model cast as a whole."""

    x: Tensor
    grad: Tensor
    parameters: tuple[Tensor, ...]
    residual: tuple[Tensor, ...] = ()  # of the add alone: the residual,
    grad_sum: tuple[Tensor, ...] = ()  # and the gradient that the sum gets from elsewhere

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What a backward takes the gradients of."""
        return self.x, *self.residual, *self.parameters

    @property
    def grads(self) -> tuple[Tensor, ...]:
        """A gradient for each output."""
        return self.grad, *self.grad_sum

    def head(self, rows: int) -> Inputs:
        """The first rows alone, apart from this one's autograd graph."""

        def leaves(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
            return tuple(t.detach()[:rows].requires_grad_() for t in tensors)

        parameters = tuple(p.detach().requires_grad_() for p in self.parameters)
        grad_sum = tuple(g[:rows] for g in self.grad_sum)
        return Inputs(*leaves([self.x]), self.grad[:rows], parameters, leaves(self.residual), grad_sum)


@functools.lru_cache(maxsize=1)
def make_inputs(norm: str, rows: int, cols: int, dtype: torch.dtype, residual_dtype: torch.dtype) -> Inputs:
    """Normal inputs from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    parameters = tuple(normal(cols).requires_grad_() for _ in range(NORM_PARAMETERS[norm]))
    found = Inputs(normal(rows, cols).requires_grad_(), normal(rows, cols), parameters)
    if norm not in ADD_TITLES:
        return found
    residual, grad_sum = (normal(rows, cols, dtype=residual_dtype) for _ in range(2))
    return found._replace(residual=(residual.requires_grad_(),), grad_sum=(grad_sum,))


def forward_run(function: Norm, inputs: Inputs) -> Run:
    """A call that gives the output, or output and sum. The caller sets the grad mode."""
    tensors, shape, parameters = (inputs.x, *inputs.residual), list(inputs.x.shape[-1:]), inputs.parameters
    return lambda: function(*tensors, shape, *parameters, EPS)


def gradients_run(forward: Run, inputs: Inputs) -> Run:
    """Forward, and the gradients of x, the residual and the parameters."""
    wanted, grads = inputs.leaves, inputs.grads
    return lambda: torch.autograd.grad(forward(), wanted, grads)


def backward_run(forward: Run, inputs: Inputs) -> Run:
    """The gradients alone, over a graph built here."""
    wanted, grads, outputs = inputs.leaves, inputs.grads, forward()
    return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)


def module_run(case: Case, module: type[nn.Module], inputs: Inputs) -> Run:
    """A module's call, with the inputs' own parameters in it."""
    norm, x, grad = module(case.cols, EPS), inputs.x, inputs.grad
    for name, parameter in zip(("weight", "bias"), inputs.parameters, strict=False):
        setattr(norm, name, nn.Parameter(parameter.detach()))
    if not case.backward:
        return lambda: norm(x)
    wanted = (x, *norm.parameters())
    return lambda: torch.autograd.grad(norm(x), wanted, grad)


def limit_run(case: Case, inputs: Inputs) -> Run:
    """Moves the bytes that the case must move into fresh memory, and computes nothing."""
    x, grad = inputs.x.detach(), inputs.grad
    if case.norm in ADD_TITLES:
        forward, backward = _limits_of_the_add(x, inputs)
    else:
        forward, backward = x.clone, lambda: torch.add(x, grad)
    if case.direction == BACKWARD:
        return backward
    return (lambda: (forward(), backward())) if case.backward else forward


def _limits_of_the_add(x: Tensor, inputs: Inputs) -> tuple[Run, Run]:
    """Forward reads two and writes two. Backward reads three and writes one, or two of different dtypes."""
    grad, (grad_sum,), residual = inputs.grad, inputs.grad_sum, inputs.residual[0].detach()
    # The sum is a tensor like the residual, and stands for it here.
    if grad.dtype == residual.dtype:
        return lambda: (x.clone(), residual.clone()), lambda: torch.addcmul(residual, grad, grad_sum)
    return lambda: (x.clone(), residual.clone()), lambda: (torch.add(residual, grad_sum), grad.clone())


def _directed(case: Case, function: Norm, inputs: Inputs) -> Run:
    forward = forward_run(function, inputs)
    if not case.backward:
        return forward
    return (backward_run if case.direction == BACKWARD else gradients_run)(forward, inputs)


def in_two_steps(norm: Norm) -> Norm:
    """The residual add and a norm after it as two operations.

    Of an fp32 sum under bf16 the norm gets a rounded copy. With the norm in fp32 and its output rounded,
    three of four norms take longer (512x4096: 1.5 to 1.8 ms in place of 1.1 to 1.6); ``F.rms_norm`` gains.
    """

    def add_norm(x: Tensor, residual: Tensor, shape: list[int], *rest: Any) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total.to(x.dtype), shape, *rest), total

    return add_norm


def _functions(norm: str) -> dict[str, Norm]:
    """What computes a norm, by candidate."""
    ours = getattr(fusednorm.functional, norm)
    if norm not in ADD_TITLES:
        return {"ours": ours, "eager": getattr(F, norm)}
    plain = norm.removeprefix("add_")
    unfused, eager = in_two_steps(getattr(fusednorm.functional, plain)), in_two_steps(getattr(F, plain))
    return {"ours": ours, "unfused": unfused, "eager": eager}


def candidates(case: Case, inputs: Inputs, compiled: bool) -> dict[str, Run]:
    """Every candidate of a case by name, ready to be called."""
    if case.direction in MODULE_DIRECTIONS:
        name = NORM_TITLES[case.norm]  # both packages name their modules so
        packages = {"ours": fusednorm, "eager": nn}
        return {who: module_run(case, getattr(package, name), inputs) for who, package in packages.items()}
    functions = _functions(case.norm)
    found = {name: _directed(case, function, inputs) for name, function in functions.items()}
    if compiled:
        torch._dynamo.reset()  # each case compiles for its own shape and thread count

        def formula(*arguments: Any) -> Any:
            return functions["eager"](*arguments)

        found["compile"] = _directed(case, torch.compile(formula, dynamic=False), inputs)
    if case.direction == FORWARD:
        import onnx_candidates

        run = onnx_candidates.forward(case, inputs.x, inputs.residual, inputs.parameters, EPS)
        if run is not None:
            found["onnxruntime"] = run
    found["limit"] = limit_run(case, inputs)
    return found


def gradient_terms(norm: str, normalized: Tensor, inputs: Inputs, eps: float) -> list[Tensor]:
    """How large the terms of each gradient's sums are.

    Where they cancel, as in rows of one column, the rounding of a sum is that of its terms.
    """
    x, g, w = normalized.detach(), inputs.grad.double(), inputs.parameters[0].detach().double()
    centered = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
    rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    of_x = sum((grad.double().abs() for grad in inputs.grad_sum), (g * w).abs() * rstd)
    return [of_x, *[of_x] * len(inputs.residual), (g * centered * rstd).abs().sum(0), g.abs().sum(0)]


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
    few, plain = inputs.head(CHECK_ROWS), case.norm.removeprefix("add_")
    forward = forward_run(_functions(case.norm)["ours"], few)
    # A gradient has its leaf's dtype, and rounded ones are no reference: the leaves are doubles. Of the add,
    # the first is the sum as it is rounded by all candidates; x and the residual share its gradient.
    totals = [reference.residual_sum(few.x.detach(), r.detach()) for r in few.residual]
    doubles = [t.detach().double().requires_grad_() for t in (*(totals or [few.x]), *few.parameters)]
    with torch.enable_grad():
        output, made = getattr(reference, plain)(*doubles, eps=EPS), _outputs(forward())
        errors = {"output": reference.ulps(made[0], output)}
        for total, expected in zip(made[1:], totals, strict=True):
            errors["sum"] = 0.0 if torch.equal(total, expected) else torch.inf  # of the same bits
        if case.backward:
            through = torch.autograd.grad(output, doubles, few.grad.double())
            of_x = sum((grad.double() for grad in few.grad_sum), through[0])
            expected_grads = (of_x, *[of_x] * len(few.residual), *through[1:])
            names = ("x", *["the residual"] * len(few.residual), "the weight", "the bias")
            terms = gradient_terms(plain, doubles[0], few, EPS)
            actual = gradients_run(forward, few)()
            for name, a, e, t in zip(names, actual, expected_grads, terms, strict=False):
                errors[f"gradient of {name}"] = ulps_of_terms(a, e, t)
    for what, error in errors.items():
        if not error <= MAX_ULPS:
            raise RuntimeError(f"{case}: the {what} is off by {error:.1f} ulp (at most {MAX_ULPS:g} allowed)")
    found: dict[str, float] = {}
    for candidate, run in runs.items() if case.direction == FORWARD else ():
        if candidate == "limit":
            continue
        result = run()
        results = _outputs(result() if callable(result) else result)
        for what, actual, expected in zip(
            ("output", "sum")[: len(made)], results, (output, *totals), strict=True
        ):
            error = reference.ulps(actual[:CHECK_ROWS], expected)
            if not error * reference.unit(actual.dtype) <= MAX_ERROR_OTHERS:
                raise RuntimeError(f"{case}: {candidate}'s {what} is off by {error:.0f} ulp")
            if what == "output":
                found[candidate] = round(error, 2)
    return found


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
