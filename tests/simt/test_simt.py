"""The CUDA kernels on the host, thread by thread under the checks of tests/simt/, around every switch-over.

A failed check (bounds, races, unwritten outputs, ...) is a RuntimeError out of the operator, so each case
here tests that as well. Skipped without ``FUSEDNORM_SIMT_LIBRARY``, which ctest sets (conftest.py loads it).
``FUSEDNORM_SIMT_FULL=1`` (make test-simt) runs every size; otherwise the shortest rows of each kernel.
"""

import dataclasses
import functools
import itertools
import math
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import test_values
from conftest import NORMS, SIMT_LIBRARY, NormUnderTest, simt_launches
from fusednorm import _C
from reference import DTYPES, HALVES, ulps
from test_values import FORWARD_ULPS, check_gradients

if not SIMT_LIBRARY:
    pytest.skip("FUSEDNORM_SIMT_LIBRARY is not set: no kernel was run", allow_module_level=True)
FULL = os.environ.get("FUSEDNORM_SIMT_FULL") == "1"

ARCHS = (80, 90, 100, 120)
PAIRS = [*((d, d) for d in DTYPES), *((d, torch.float32) for d in HALVES)]  # of input and output or grad
# Around chunks, lanes, warps and the classical limits; the plan's own switch-overs are found below.
COLS = [1, 2, 3, 7, 8, 9, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025, 4095, 4097, 8191, 8192, 8193, 65537]
LONGEST = 2**21  # more than any cluster holds in shared memory
LONGEST_BACKWARD = 140_000  # it takes ten times as long to run, and beyond has no other kernel

# ---- The plans ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Forward or backward of a norm: what decides on the kernel."""

    direction: str
    arch: int
    norm: NormUnderTest
    dtype: torch.dtype
    other: torch.dtype  # of output or grad_output
    cols: int

    def __str__(self) -> str:
        dtypes = str(self.dtype)[6:] + ("" if self.dtype == self.other else "-" + str(self.other)[6:])
        return f"{self.norm.name}-{dtypes}-sm{self.arch}-{self.cols}"


@functools.cache
def plans(
    arch: int, dtype: torch.dtype, other: torch.dtype, cols: int, rows: int = 5, norm: str = "layer_norm"
) -> dict[str, dict[str, Any]]:
    return _C.explain(rows, cols, str(dtype)[6:], str(other)[6:], norm, arch)


def kind(direction: str, plan: dict[str, Any]) -> tuple[Any, ...]:
    """The kernel that a plan names, who shares a row there, and of backward the rows of a block."""
    threads = plan["threads_per_row"]
    shared_by = (
        "cluster"
        if plan["cluster"] > 1
        else "block"
        if threads > 32
        else "warp"
        if threads == 32
        else "lanes"
    )
    if direction == "backward":
        return "two launches" if plan["launches"] == 2 else shared_by, plan["units"], plan["rows_per_block"]
    units = plan["units"] if plan["kernel"] == "registers" else 0  # else the length of a loop
    return plan["unit_bytes"], plan["kernel"], units, shared_by


def covered(case: Case) -> tuple[Any, ...]:
    plan = plans(case.arch, case.dtype, case.other, case.cols)[case.direction]
    exact = case.cols % plan["columns"] == 0  # whole units, and rows that start on one
    return case.direction, case.norm.name, case.dtype, case.other, *kind(case.direction, plan), exact


@functools.cache
def sizes(direction: str, arch: int, dtype: torch.dtype, other: torch.dtype) -> list[int]:
    """COLS and the switch-overs: last before, first after, one more, first of whole units after."""

    def key(cols: int) -> tuple[Any, ...]:
        plan = plans(arch, dtype, other, cols)[direction]
        blocks = ("blocks_per_row", "stages") if direction == "backward" else ("rows_per_block",)
        return (*kind(direction, plan), plan["cluster"], *(plan[name] for name in blocks))

    found, low = set(COLS), 1
    while low < (LONGEST_BACKWARD if direction == "backward" else LONGEST):
        high = low + 1 + low // 32
        if key(high) != key(low):
            last, first = low, high
            while first - last > 1:
                middle = (last + first) // 2
                last, first = (middle, first) if key(middle) == key(low) else (last, middle)
            columns = plans(arch, dtype, other, first)[direction]["columns"]
            found |= {last, first, first + 1, last + columns}
            high = first
        low = high
    return sorted(found)


def rows_for(cols: int) -> int:
    return 5 if cols <= 4100 else 2 if cols <= 70_000 else 1


def all_cases() -> list[Case]:
    """Without those whose launch an earlier architecture has, to the last of its numbers."""
    cases: dict[Any, Case] = {}
    for direction, (dtype, other), arch in itertools.product(("forward", "backward"), PAIRS, ARCHS):
        for cols, norm in itertools.product(sizes(direction, arch, dtype, other), NORMS):
            plan = plans(arch, dtype, other, cols, rows_for(cols), norm.name)[direction]
            launch = tuple(v for k, v in plan.items() if k not in ("max_registers", "bytes_in_flight"))
            case = Case(direction, arch, norm, dtype, other, cols)
            cases.setdefault((direction, norm.name, dtype, other, cols, launch), case)
    return list(cases.values())


def shortest_cases(cases: list[Case]) -> list[Case]:
    """Of each kernel, of whole units and of others, the case with the shortest rows."""
    chosen: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda c: c.cols):
        chosen.setdefault(covered(case), case)
    return list(chosen.values())


ALL = all_cases()
CASES = ALL if FULL else shortest_cases(ALL)


def kinds(
    direction: str, arch: int, dtype: torch.dtype, other: torch.dtype | None, longest: int
) -> list[int]:
    """The shortest row that is not of whole units, for each kernel."""
    chosen: dict[Any, int] = {}
    for cols in sizes(direction, arch, dtype, other or dtype):
        plan = plans(arch, dtype, other or dtype, cols)[direction]
        if cols % plan["columns"] != 0 and 1 < cols <= longest:
            chosen.setdefault(kind(direction, plan), cols)
    return list(chosen.values())


EVERYWHERE = list(itertools.product(ARCHS, DTYPES))
# Every kernel of 16-byte units without clusters, and of 32-byte units with them.
SOME = [(80, torch.float32), (120, torch.bfloat16)]
STREAMING = [(80, torch.float32), (120, torch.float64)]  # where the longest rows are not so long


def each_kind(longest: int, longest_streaming: int = 0) -> pytest.MarkDecorator:
    """Architecture, dtype and length of a row, for each kernel of both directions."""

    def lengths(arch: int, dtype: torch.dtype) -> list[int]:
        limit = max(longest, longest_streaming if (arch, dtype) in STREAMING else 0)
        return sorted({c for d in ("forward", "backward") for c in kinds(d, arch, dtype, None, limit)})

    return pytest.mark.parametrize(
        ("arch", "dtype", "cols"),
        [
            pytest.param(arch, dtype, cols, id=f"sm{arch}-{str(dtype)[6:]}-{cols}")
            for arch, dtype in (EVERYWHERE if FULL else SOME)
            for cols in lengths(arch, dtype)
        ],
    )


def test_every_kernel_has_a_case() -> None:
    """The kernels are counted as row_norm_launch.cu lists them, apart from the one that reduces."""
    everything, here = {covered(c) for c in ALL}, {covered(c) for c in CASES}
    assert here == everything
    forward = {(*k[1:-2], k[-1]) for k in here if k[0] == "forward"}
    # 6 (4 of 32-byte units) that hold the row in registers and 2 loops, with whole units and without.
    assert len(forward) == len(NORMS) * len(PAIRS) * (6 + 2 + 4 + 2) * 2
    backward = {(*k[1:4], k[4] == "two launches", k[5], k[-1]) for k in here if k[0] == "backward"}
    assert len(backward) == len(NORMS) * len(PAIRS) * 3 * 2


# ---- Running them ---------------------------------------------------------------------------------------


def on(monkeypatch: pytest.MonkeyPatch, arch: int, seed: int = 0) -> None:
    monkeypatch.setenv("FUSEDNORM_SIMT_ARCH", str(arch))
    monkeypatch.setenv("FUSEDNORM_SIMT_SEED", str(seed))


def problem(
    rows: int, cols: int, dtype: torch.dtype, other: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight (of the input's dtype), bias and grad_output (of the other)."""
    x = (0.5 + torch.randn(rows, cols, dtype=torch.float64)).to(dtype)
    w = (1 + 0.25 * torch.randn(cols, dtype=torch.float64)).to(dtype)
    b, g = (torch.randn(s, dtype=torch.float64).to(other or dtype) for s in ((cols,), (rows, cols)))
    return x, w, b, g


def forward(
    norm: NormUnderTest,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    out: torch.dtype | None = None,
    **kw: Any,
) -> list[Tensor]:
    """Output, mean (of LayerNorm) and rstd."""
    parameters = (w, b) if norm.has_bias else (w,)
    eps = kw.pop("eps", norm.eps)
    return list(norm.op("_forward")(x, [x.shape[-1]], *parameters, eps, out_dtype=out, **kw))


def backward(
    norm: NormUnderTest,
    g: Tensor,
    x: Tensor,
    statistics: list[Tensor],
    w: Tensor | None,
    b: Tensor | None,
    mask: tuple[bool, ...] = (True, True, True),
    **kw: Any,
) -> list[Tensor]:
    """The gradients of input, weight and (of LayerNorm) bias."""
    parameters = (w, b) if norm.has_bias else (w,)
    eps, mask = kw.pop("eps", norm.eps), (*mask[:2], mask[2:] == (True,) and norm.has_bias)
    gradients = norm.op("_backward")(g, x, [x.shape[-1]], *statistics, *parameters, eps, mask, **kw)
    return list(gradients[: 1 + len(parameters)])


def everything(
    norm: NormUnderTest,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    g: Tensor,
    mask: tuple[bool, ...] = (True, True, True),
    **kw: Any,
) -> list[Tensor]:
    """Forward's results, then backward's."""
    y, *statistics = forward(norm, x, w, b, **kw)
    return [y, *statistics, *backward(norm, g, x, statistics, w, b, mask, **kw)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def per_row(norm: NormUnderTest, results: list[Tensor]) -> list[Tensor]:
    """Output, statistics and grad_input: what each row has of its own."""
    return results[: 4 if norm.has_bias else 3]


def shifted(t: Tensor, elements: int) -> Tensor:
    """The values of ``t``, so many elements behind an aligned address."""
    return torch.empty(t.numel() + elements, dtype=t.dtype)[elements:].view(t.shape).copy_(t)


def test_the_library_is_in_effect(norm: NormUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 90)
    x = torch.randn(3, 8)
    before = simt_launches()
    norm(x, None, None)
    assert simt_launches() == before + 1
    xr, w = x.clone().requires_grad_(), torch.ones(8, requires_grad=True)
    norm(xr, w, None).sum().backward()
    assert simt_launches() == before + 4  # forward, backward, the sum over the groups


# ---- Values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.direction == "forward"], ids=str)
def test_forward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, case.arch)
    norm = case.norm
    x, w, b, _ = problem(rows_for(case.cols), case.cols, case.dtype, case.other)
    y, *statistics = forward(norm, x, w, b, case.other)
    assert y.dtype == case.other
    assert ulps(y, norm.reference(x, w, b)) <= FORWARD_ULPS[case.other]
    # The statistics to a few ulps: of rstd itself, of the row's largest value for the mean.
    wide = x.double()
    mean = wide.mean(-1) if norm.has_bias else torch.zeros(len(x), dtype=torch.float64)
    rstd = ((wide - mean[:, None]).square().mean(-1) + norm.eps).rsqrt()
    unit = torch.finfo(statistics[-1].dtype).eps
    assert ((statistics[-1].double() / rstd - 1).abs() <= 4 * unit).all()
    if norm.has_bias:
        assert ((statistics[0].double() - mean).abs() <= unit * wide.abs().amax(-1)).all()


def with_out_dtype(norm: NormUnderTest, out: torch.dtype) -> NormUnderTest:
    """The norm whose output has another dtype than its input, as under autocast."""

    def function(x: Tensor, shape: torch.Size, *rest: Any, **kw: Any) -> Tensor:
        return norm.op("_forward")(x, list(shape), *rest, out_dtype=out, **kw)[0]

    return dataclasses.replace(norm, function=function)


@pytest.mark.parametrize("case", [c for c in CASES if c.direction == "backward"], ids=str)
def test_backward(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, case.arch)
    x, w, b, g = problem(rows_for(case.cols), case.cols, case.dtype, case.other)
    check_gradients(with_out_dtype(case.norm, case.other), x, w, b, g)


ROWS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 263, 264, 265, 528, 529, 1000, 1184, 1185, 2369]


@pytest.mark.parametrize(
    ("rows", "cols"),
    [*((r, c) for r in ROWS for c in (8, 33, 520)), (3000, 8), (2000, 33), (6000, 1), (40, 8200), (267, 2056)]
    if FULL
    else [*((r, 33) for r in (1, 17, 129, 265)), (3000, 8), (37, 520)],
)
def test_row_counts(norm: NormUnderTest, rows: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around rows_per_block and the numbers of groups."""
    on(monkeypatch, 90)
    dtypes = (torch.float32, torch.bfloat16) if FULL else (torch.float32,)
    for dtype in dtypes:
        x, w, b, g = problem(rows, cols, dtype)
        # Of thousands of rows some have weights and a bias that make the row's largest output small, and the
        # error stays: see test_cuda.py.
        limit = FORWARD_ULPS[dtype] * (2 if rows * cols > 10_000 or cols < 32 else 1)
        assert ulps(norm(x, w, b), norm.reference(x, w, b)) <= limit
        if cols > 1:
            check_gradients(norm, x, w, b, g)


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_to_do(norm: NormUnderTest, arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows: zero gradients of the parameters. No columns: empty ones."""
    on(monkeypatch, arch)
    for shape in ((0, 8), (3, 0, 8), (0, 65_537)):
        x, w = torch.empty(shape), torch.ones(shape[-1])
        y, *others = everything(norm, x, w, w, x)
        dx, *parameters = others[2 if norm.has_bias else 1 :]
        assert y.shape == dx.shape == shape
        assert all(t.shape == (shape[-1],) and (t == 0).all() for t in parameters)
    x, w = torch.empty(3, 0), torch.ones(0)
    assert all(t.numel() == 0 or t.isnan().all() for t in everything(norm, x, w, w, x))


# ---- Memory ---------------------------------------------------------------------------------------------


@each_kind(20_000 if FULL else 10_000)
def test_alignments(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument at odd places of a flat buffer; rows of whole units and of others: the same bits."""
    on(monkeypatch, arch)
    for n in (cols, cols + -cols % 16):
        x, w, b, g = problem(rows_for(cols), n, dtype)
        expected = everything(norm, x, w, b, g)
        for offsets in [(1, 0, 0, 0), (0, 0, 0, 1), (3, 7, 1, 1), (7, 1, 3, 3), (1, 3, 7, 7)]:
            moved = [shifted(t, o) for t, o in zip((x, w, b, g), offsets, strict=True)]
            assert same(everything(norm, *moved), expected), (n, offsets)


def other_memory(t: Tensor) -> dict[str, Tensor]:
    """The values of ``t`` (3 leading dimensions) in other memory."""
    cols = t.shape[-1]
    packed = torch.zeros(*t.shape[:-1], 3 * cols, dtype=t.dtype)
    return {
        "row gap": torch.zeros(*t.shape[:-1], cols + 5, dtype=t.dtype)[..., 2:-3].copy_(t),
        "permuted": t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "packed, first": packed.clone()[..., :cols].copy_(t),
        "packed, last": packed[..., 2 * cols :].copy_(t),
        "last strided": torch.zeros(*t.shape[:-1], cols * 2, dtype=t.dtype)[..., ::2].copy_(t),
    }


@each_kind(10_000 if FULL else 5000)
def test_strides(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    shape = (2, 3, 2) if cols < 1000 else (2, 1, 2)
    for n in (cols, cols + -cols % 16):
        x, w, b, g = (t.view(*shape, n) if t.dim() == 2 else t for t in problem(math.prod(shape), n, dtype))
        expected = everything(norm, x, w, b, g)
        for name, strided in other_memory(x).items():
            assert same(everything(norm, strided, w, b, g), expected), name
        for name, strided in other_memory(g).items():
            assert same(everything(norm, x, w, b, strided), expected), name
        row_x, row_g = (t[:1, :1].expand(*shape, n) for t in (x, g))
        expected = everything(norm, row_x.contiguous(), w, b, row_g.contiguous())
        assert same(everything(norm, row_x, w, b, row_g), expected), "expanded"


# ---- Bits -----------------------------------------------------------------------------------------------


@each_kind(20_000 if FULL else 10_000, 90_000 if FULL else 40_000)
def test_a_row_has_the_same_bits_in_any_batch(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 2: alone, among others, and at another position, in another slot of a block."""
    on(monkeypatch, arch)
    rows = 133 if cols < 100 else 9 if cols < 5000 else 3
    rows_only = (True, False, False)  # without the sums over rows
    x, w, b, g = problem(rows, cols, dtype)
    whole = per_row(norm, everything(norm, x, w, b, g, mask=rows_only))
    for picked in ([0], [rows // 2], [rows - 1], list(range(rows))[::-1], [rows - 1, 1, 0]):
        some = per_row(norm, everything(norm, x[picked], w, b, g[picked], mask=rows_only))
        assert same(some, [t[picked] for t in whole]), picked


# The switch-overs between numbers of blocks and of threads, in columns of 16 bits and of more.
BITS_COLS = [1, 7, 33, 257, 1025, 4097, 8193, 16_385] + [2049, 32_769, 65_537] * FULL


@pytest.mark.parametrize("cols", BITS_COLS)
@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=lambda d: str(d)[6:])
def test_architectures_and_seeds_do_not_change_bits(
    norm: NormUnderTest, dtype: torch.dtype, other: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of backward have one order on every architecture; of forward where the plan has one.

    Nor does the order in which threads run matter.
    """
    x, w, b, g = problem(300 if cols < 100 else 3, cols, dtype, other)
    if cols > 100:
        x, g = x[: rows_for(cols)], g[: rows_for(cols)]
    on(monkeypatch, 90)
    _, *statistics = forward(norm, x, w, b, other)
    outputs: dict[Any, list[Tensor]] = {}
    gradients = None
    for arch, seed in [*((a, 0) for a in ARCHS), (90, 1), (120, 20261130), *([(80, 5), (100, 6)] * FULL)]:
        on(monkeypatch, arch, seed)
        plan = plans(arch, dtype, other, cols)["forward"]
        y = forward(norm, x, w, b, other)
        assert same(y, outputs.setdefault((plan["unit_bytes"], plan["threads_per_row"]), y)), (arch, seed)
        got = backward(norm, g, x, statistics, w, b)
        gradients = gradients or got
        assert same(got, gradients), (arch, seed)


@each_kind(20_000 if FULL else 10_000)
def test_seeds_do_not_change_bits(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b, g = problem(67 if cols < 100 else rows_for(cols), cols, dtype)
    x[0] *= 1e-4 if dtype == torch.float16 else 1e-30  # the second look at extreme rows has its barriers too
    on(monkeypatch, arch)
    expected = everything(norm, x, w, b, g, eps=0.0)
    for seed in (1, 2, 77, 20261130):
        on(monkeypatch, arch, seed)
        assert same(everything(norm, x, w, b, g, eps=0.0), expected), seed


# ---- Extreme rows ---------------------------------------------------------------------------------------

# Powers of two: with eps 0 they change nothing but the scale, not even rounding.
SCALES = {
    torch.float64: (2.0**664, 2.0**-664),
    torch.float32: (2.0**100, 2.0**-100),
    torch.bfloat16: (2.0**100, 2.0**-100),
    torch.float16: (2.0**13, 2.0**-10),
}


@each_kind(20_000 if FULL else 10_000, 90_000 if FULL else 40_000)
def test_extreme_rows(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Huge, tiny, constant and non-finite rows between ordinary ones, which keep their bits."""
    on(monkeypatch, arch)
    rows_only = (True, False, False)
    huge, tiny = SCALES[dtype]
    # With 7 rows backward has 4 groups: rows r and r + 4 go to the same block, one after the other. There an
    # ordinary row follows an extreme one, and the reverse.
    x, w, b, g = problem(7, cols, dtype)
    ordinary = [0, 2, 5]
    clean = per_row(norm, everything(norm, x[ordinary], w, b, g[ordinary], mask=rows_only, eps=0.0))
    plain = x.clone()
    x[1], x[3], x[4], x[6] = x[1] * huge, 3.0, x[4] * tiny, x[6] * huge
    results = per_row(norm, everything(norm, x, w, b, g, mask=rows_only, eps=0.0))
    assert same([t[ordinary] for t in results], clean)
    # LayerNorm of a constant row with eps 0 is 0 / 0 to the reference: with eps it is the bias.
    # (And fp64 rows as large as this are beyond it: it gets them unscaled.)
    others = [0, 1, 2, 4, 5, 6]
    within = plain.clone() if dtype == torch.float64 else x
    assert ulps(results[0][others], norm.reference(within[others], w, b, eps=0.0)) <= FORWARD_ULPS[dtype]
    y = forward(norm, x[3:4], w, b)[0]
    assert ulps(y, norm.reference(x[3:4], w, b)) <= FORWARD_ULPS[dtype]
    assert not norm.has_bias or torch.equal(y[0], b)
    if dtype == torch.float64:
        scales = torch.tensor([[huge], [tiny]], dtype=dtype)
        rows = plain[[1, 4]].requires_grad_()
        (expected,) = torch.autograd.grad(norm.reference(rows, w, b, eps=0.0), rows, g[[1, 4]])
        # As in check_gradients: ulps of the terms that grad_input is the sum of, not of what is left.
        with torch.no_grad():
            deviation = rows - rows.mean(-1, keepdim=True) if norm.has_bias else rows
            terms = (g[[1, 4]] * w).abs().amax(-1, keepdim=True) / deviation.square().mean(
                -1, keepdim=True
            ).sqrt()
        assert ((results[-1][[1, 4]] * scales - expected).abs() <= 8 * 2.0**-52 * terms).all()
    else:
        check_gradients(norm, x[[1, 4]], w, b, g[[1, 4]], eps=0.0)

    for t in (x, within):
        t[1, cols // 2], t[4, -1], t[6, 0] = math.nan, math.inf, -math.inf
    results = per_row(norm, everything(norm, x, w, b, g, mask=rows_only, eps=0.0))
    assert same([t[ordinary] for t in results], clean)
    assert ulps(results[0][others], norm.reference(within[others], w, b, eps=0.0)) <= FORWARD_ULPS[dtype]
    assert results[-1][[1, 4, 6]].isnan().any(-1).all()


# ---- Options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, repeat=3)), ids=lambda d: "-".join(str(t)[6:] for t in d)
)
@pytest.mark.parametrize("arch", ARCHS if FULL else (120,))
def test_mixed_dtypes(
    norm: NormUnderTest, arch: int, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    for cols in (9, 40, 1030, 8200) if FULL else (9, 1030):
        x, w, b, g = problem(3, cols, dtypes[0])
        w, b = w.to(dtypes[1]), b.to(dtypes[2])
        if dtypes[0] != torch.float64:
            # The kernels round fp64 parameters to fp32 first: compare with those.
            w, b = (t.float().to(t.dtype) for t in (w, b))
        y = norm(x, w, b)
        assert y.dtype == dtypes[0] and ulps(y, norm.reference(x, w, b)) <= FORWARD_ULPS[dtypes[0]]
        check_gradients(norm, x, w, b, g)


OPTION_KINDS = each_kind(20_000 if FULL else 10_000)


@OPTION_KINDS
def test_options(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    x, w, b, g = problem(rows_for(cols), cols, dtype)
    choices: list[dict[str, Any]] = [{"weight_offset": 1.0}]
    if norm.has_bias:
        choices += [{"eps_outside": True, "eps": 1e-3}, {"unbiased": True}]
    for options in choices:
        assert ulps(norm(x, w, b, **options), norm.reference(x, w, b, **options)) <= FORWARD_ULPS[dtype], (
            options
        )
        check_gradients(norm, x, w, b, g, **options)
    # Parameters that are not there, against ones and zeros that are: the same bits.
    ones, zeros = torch.ones_like(w), torch.zeros_like(b)
    for weight, bias in itertools.product((w, None), (b, None)):
        expected = everything(norm, x, ones if weight is None else w, zeros if bias is None else b, g)
        assert same(everything(norm, x, weight, bias, g), expected)


@OPTION_KINDS
def test_output_mask(
    norm: NormUnderTest, arch: int, dtype: torch.dtype, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, arch)
    x, w, b, g = problem(rows_for(cols), cols, dtype)
    _, *statistics = forward(norm, x, w, b)
    whole = backward(norm, g, x, statistics, w, b)
    for mask in itertools.product([False, True], repeat=len(whole)):
        for wanted, got, expected in zip(
            mask, backward(norm, g, x, statistics, w, b, mask=mask), whole, strict=True
        ):
            assert (got is not None) == wanted
            assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize(("dtype", "other"), [p for p in PAIRS if p[0] in HALVES], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("arch", ARCHS if FULL else (80, 120))
def test_llama_casting_mode(
    arch: int, dtype: torch.dtype, other: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x_hat rounded to 16 bits before the weight, in every kernel."""
    on(monkeypatch, arch)
    rms, longest = NORMS[1], 70_000 if FULL else 10_000
    for cols in {c for d in ("forward", "backward") for c in kinds(d, arch, dtype, other, longest)}:
        if dtype == other:
            test_values.test_llama_casting_mode(dtype, cols)
            continue
        x, w, _, g = problem(2, cols, dtype, other)
        y, *statistics = forward(rms, x, w, None, other, casting_mode="llama")
        _, grad_weight = backward(rms, g, x, statistics, w, None, casting_mode="llama")
        x_hat = forward(rms, x, None, None, other)[0].to(dtype)
        assert torch.equal(y, x_hat.float() * w.float())
        terms = g.double() * x_hat.double()
        # One rounding at the store (of a subnormal number, half of the spacing of those); the sums over two
        # rows are exact to ulps of fp32.
        info = torch.finfo(dtype)
        bound = info.eps / 2 * terms.sum(0).abs().clamp_min(info.tiny)
        bound += 4 * torch.finfo(other).eps * terms.abs().sum(0)
        assert ((grad_weight.double() - terms.sum(0)).abs() <= bound).all()


# ---- Errors of the host side ----------------------------------------------------------------------------


def test_a_failed_launch_names_kernel_and_configuration(
    norm: NormUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 4096, requires_grad=True)
    y = norm(x, None, None)
    monkeypatch.setenv("FUSEDNORM_SIMT_LAUNCH_ERROR", "2")
    with pytest.raises(RuntimeError) as forward:
        norm(x, None, None)
    with pytest.raises(RuntimeError) as backward:
        torch.autograd.grad(y.sum(), x)
    for error, operator, kernel in (
        (forward, norm.name, "row_norm_forward (registers)"),
        (backward, norm.name + "_backward", "row_norm_backward"),
    ):
        message = f"fusednorm::{operator}: the launch of {kernel} failed: error 2 ("
        assert message in str(error.value) and "blocks of" in str(error.value)
        assert "bytes of shared memory)" in str(error.value)


def test_a_plan_too_large_for_the_device(norm: NormUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with less shared memory than its architecture promises: forward streams, backward says so."""
    x = torch.randn(2, 4096, requires_grad=True)
    monkeypatch.setenv("FUSEDNORM_SIMT_SHARED", "20000")
    y = norm(x, None, None)
    with pytest.raises(RuntimeError, match=r"_backward: the plan needs \d+ bytes of shared memory a block"):
        torch.autograd.grad(y.sum(), x)


def test_rows_longer_than_32_bits_count(norm: NormUnderTest) -> None:
    x = torch.empty(1, dtype=torch.float16).expand(1, 2**30 + 1)
    with pytest.raises(RuntimeError, match="input: expected rows of at most 1073741824 elements"):
        norm(x, None, None)
