"""The fused residual add's CUDA kernels on the host, for each kernel there is: see test_simt.py.

The bits that are promised: the sum is one fused multiply-add, rounded to the residual's dtype; the output is
that of our norm of the stored sum. In place they are the same.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from conftest import NormUnderTest, simt_launches
from reference import DTYPES, HALVES, residual_sum
from test_add_norm import (  # noqa: F401 (tests there are tests here)
    FP32,
    add_norm,
    check_gradients,
    check_values,
    gradients,
    problem,
    same,
    test_an_unused_output_costs_nothing,
    test_b03_either_output_alone,
    test_b14_sums_beyond_fp16,
    test_b40_zero_rows_and_columns,
    test_every_pair_of_dtypes,
    test_expanded_inputs_and_gradients,
    test_extreme_rows,
    test_incoming_gradients_are_not_touched_or_handed_out,
    test_llama_rounds_as_the_stream_is_stored,
    test_non_finite_stays_in_its_row,
    test_only_the_gradients_asked_for,
    test_options,
    test_parameter_gradients_accumulate_in_fp32,
    test_parameters_of_any_dtype,
    test_several_normalized_dimensions_and_no_parameters,
    test_strides_each_of_its_own,
)
from test_simt import ARCHS, FULL, kinds, on, other_memory, plans, rows_for, shifted

# Of input and residual, as they are fused: kernels of the residual's rows beside the input's dtype.
ADD_PAIRS = [*((d, d) for d in DTYPES), *((d, FP32) for d in HALVES)]
SOME = [(80, ADD_PAIRS[1]), (80, ADD_PAIRS[4]), (90, ADD_PAIRS[4]), (120, ADD_PAIRS[2]), (120, ADD_PAIRS[5])]


def lengths(arch: int, dtype: torch.dtype, residual_dtype: torch.dtype, longest: int) -> list[int]:
    """The shortest rows of each kernel, of whole units and of others.

    Plans know a row by its widest dtype: those of a 16-bit input beside fp32 are those of fp32.
    """
    found: set[int] = set()
    for direction in ("forward", "backward"):
        for cols in kinds(direction, arch, residual_dtype, None, longest):
            found |= {cols, cols + -cols % 16}
    return sorted(found)


def each_kind(longest: int) -> pytest.MarkDecorator:
    places = list(itertools.product(ARCHS, ADD_PAIRS)) if FULL else SOME
    return pytest.mark.parametrize(
        ("arch", "dtype", "residual_dtype", "cols"),
        [
            pytest.param(arch, *pair, cols, id=f"sm{arch}-{str(pair[0])[6:]}-{str(pair[1])[6:]}-{cols}")
            for arch, pair in places
            for cols in lengths(arch, *pair, longest)
        ],
    )


def in_place(norm: NormUnderTest, x: Tensor, residual: Tensor, *parameters: Tensor, **kw: float) -> Tensor:
    function = getattr(torch.ops.fusednorm, f"add_{norm.name}_")
    return function(x, residual, x.shape[-1:], *parameters[: 2 if norm.has_bias else 1], norm.eps, **kw)


@each_kind(70_000 if FULL else 9_000)
def test_every_kernel(
    norm: NormUnderTest,
    arch: int,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    cols: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, arch)
    tensors = problem((rows_for(cols), cols), dtype, residual_dtype)
    s = check_values(norm, tensors, 0.37)
    y = add_norm(norm, *tensors[:4], alpha=0.37)[0]
    for use in ((True, True), (True, False)):
        check_gradients(norm, tensors, 0.37, use)
    x, residual, *parameters = tensors[:4]
    gaps = torch.zeros(len(x), cols + 16, dtype=residual_dtype)[:, :cols].copy_(residual)
    for stream in (residual.clone(), shifted(residual, 1), gaps):
        assert same((in_place(norm, x, stream, *parameters, alpha=0.37), stream), (y, s))
    stream = residual.clone()
    assert same((in_place(norm, shifted(x, 1), stream, *parameters, alpha=0.37), stream), (y, s))


@pytest.mark.parametrize(("dtype", "residual_dtype"), ADD_PAIRS, ids=lambda d: str(d)[6:])
def test_one_launch(
    norm: NormUnderTest, dtype: torch.dtype, residual_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward is one, backward two with the sums over groups of rows."""
    on(monkeypatch, 90)
    tensors = problem((3, 40), dtype, residual_dtype)
    before = simt_launches()
    add_norm(norm, *tensors[:4])
    assert simt_launches() == before + 1
    gradients(norm, tensors, *tensors[4:])
    assert simt_launches() == before + 4


@pytest.mark.parametrize("cols", [70_000, 300_000])
def test_rows_too_long_for_registers(norm: NormUnderTest, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed again in each pass: of what shared memory would hold, and of more. The last pass stores."""
    on(monkeypatch, 80)
    assert plans(80, FP32, FP32, cols)["forward"]["kernel"] != "registers"
    for n, dtype in ((cols, torch.bfloat16), (cols + 3, FP32)):
        tensors = problem((1, n), dtype, FP32)
        s = check_values(norm, tensors, 0.37)
        y, stream = add_norm(norm, *tensors[:4], alpha=0.37)[0], tensors[1].clone()
        assert same((in_place(norm, tensors[0], stream, *tensors[2:4], alpha=0.37), stream), (y, s))


@pytest.mark.parametrize(("cols", "seed"), [(33, 1), (1030, 77), (9000, 5)])
def test_memory_and_seeds(norm: NormUnderTest, cols: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor at odd places and strides of its own, in any order of the threads: the same bits."""
    shape = (2, 1, 2, cols)
    for dtype, residual_dtype in ADD_PAIRS[1:5:3]:
        on(monkeypatch, 90)
        tensors = problem(shape, dtype, residual_dtype)
        results = (*add_norm(norm, *tensors[:4]), *gradients(norm, tensors, *tensors[4:]))
        on(monkeypatch, 90, seed)
        for place in (0, 1, 4, 5):
            t = tensors[place]
            views = {"shifted": shifted(t, seed % 7), **other_memory(t), "itself": t}
            for name, view in views.items():
                given = (*tensors[:place], view, *tensors[place + 1 :])
                got = (*add_norm(norm, *given[:4]), *gradients(norm, given, *given[4:]))
                assert same(got, results), (place, name)


@each_kind(5_000 if FULL else 1_100)
def test_extreme_rows_among_others(
    norm: NormUnderTest,
    arch: int,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    cols: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum is stored as it is, not as the second look at such a row scales it."""
    on(monkeypatch, arch)
    x, residual, *rest = problem((7, cols), dtype, residual_dtype)
    tiny, huge = (2.0**-10, 2.0**12) if torch.float16 in (dtype, residual_dtype) else (2.0**-100, 2.0**100)
    for row, scale in ((1, huge), (3, tiny), (4, huge)):
        x[row], residual[row] = x[row] * scale, residual[row] * scale
    y, s = add_norm(norm, x, residual, *rest[:2], eps=0.0)
    assert torch.equal(s, residual_sum(x, residual, 1.0))
    assert not y.isnan().any() or cols == 1
    ordinary = [0, 2, 5, 6]
    grads = gradients(norm, (x, residual, *rest[:2]), *rest[2:], eps=0.0)
    some = (x[ordinary], residual[ordinary], *rest[:2])
    assert same(add_norm(norm, *some, eps=0.0), (y[ordinary], s[ordinary]))
    clean = gradients(norm, some, rest[2][ordinary], rest[3][ordinary], eps=0.0)
    assert same(clean[:2], tuple(g[ordinary] for g in grads[:2] if g is not None))
    if tiny == 2.0**-100 and cols > 1:
        bad = s.clone()
        bad[4, cols // 2] = math.nan
        y, s = add_norm(norm, torch.zeros_like(x), bad, *rest[:2], eps=0.0)
        assert torch.equal(s[ordinary], bad[ordinary]) and y[4].isnan().all()
