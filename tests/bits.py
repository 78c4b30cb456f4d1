"""The bits of every operator: a hash of outputs and gradients for each case, so that a change of the code can
show that it changed none of them.

    python tests/bits.py --check     compare with tests/bits.json (what test_bits.py does)
    python tests/bits.py --record    write this instruction set's hashes anew: a change of bits on purpose

``ATEN_CPU_CAPABILITY`` picks the CPU kernels (default, avx2, avx512), ``FUSEDNORM_SIMT_LIBRARY`` the CUDA
kernels on the host. A row's bits belong to an instruction set, so each has its own hashes. Inputs are made of
integers, which no library rounds; derivatives that ATen computes (``composites``) are compared under the
torch they were recorded with alone.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fusednorm

PATH = Path(__file__).parent / "bits.json"
SIMT = bool(os.environ.get("FUSEDNORM_SIMT_LIBRARY"))

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F64, F32, BF16, F16)
SHORT = {F64: "f64", F32: "f32", BF16: "bf16", F16: "f16"}
# They straddle the vectors of each instruction set, blocks of rows and of columns, chunks of rows, strips.
SHAPES: list[tuple[int, ...]] = [(1, 1), (3, 1), (5, 7), (2, 3, 16), (9, 33), (4, 257), (65, 129), (3, 1025)]
if not SIMT:
    SHAPES += [(6, 768), (70, 1023), (5, 4099), (1100, 24), (37, 8192)]
FEW: list[tuple[int, ...]] = [(5, 7), (9, 257), (2, 3, 768)]
LARGE: list[tuple[int, ...]] = [] if SIMT else [(2048, 770), (2048, 768)]  # beyond the caches

Case = Callable[[], list[Tensor | None]]


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Bell-shaped numbers of unit size, the same on every machine: sums of integers, exact in fp32."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-(2**18), 2**18, (4, *shape), dtype=np.int64).sum(0)
    return (torch.from_numpy(whole).double() / 2**18).to(dtype)


def digest(tensors: list[Tensor | None]) -> str:
    """Of values, dtypes, shapes and strides."""
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            sha.update(b"none")
            continue
        sha.update(repr((tensor.dtype, tuple(tensor.shape), tensor.stride())).encode())
        flat = tensor.detach().contiguous().view(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return sha.hexdigest()[:8]


def outputs_and_gradients(
    op: Any, tensors: list[Tensor | None], wanted: list[bool], call: Callable[..., Any]
) -> list[Tensor | None]:
    """The outputs with and without a graph, and the gradients that are wanted."""
    leaves = [
        None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)
    ]
    with torch.no_grad():
        plain = call(op, *leaves)
    made = call(op, *leaves)
    plain, made = ([o] if isinstance(o, Tensor) else list(o) for o in (plain, made))
    asked = [t for t in leaves if t is not None and t.requires_grad]
    gradients: list[Tensor | None] = []
    if asked:
        grads = [numbers(90 + i, tuple(o.shape), o.dtype) for i, o in enumerate(made)]
        gradients = list(torch.autograd.grad(made, asked, grads, allow_unused=True, retain_graph=True))
        if len(made) == 2:  # of the residual add: one of the two alone
            for i in range(2):
                gradients += torch.autograd.grad(
                    made[i], asked, grads[i], allow_unused=True, retain_graph=True
                )
    return [*plain, *made, *gradients]


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same values, in memory that is not one block; or other values that take care."""
    if how == "strided":
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 5, dtype=x.dtype)
        wide[..., 3 : 3 + x.shape[-1]] = x
        return wide[..., 3 : 3 + x.shape[-1]]
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "offset":
        return x * 3 + 1000
    if how == "extreme":
        scale = {F64: 1e200, F32: 1e30, BF16: 1e30, F16: 1e3}[x.dtype]
        y = x.clone()
        y[0], y[-1] = x[0] * scale, x[-1] / scale
        return y
    if how == "constant":
        y = x.clone()
        y[0] = 3.0
        return y
    return x


def row_norm_cases() -> Iterator[tuple[str, list[Case]]]:
    ops = torch.ops.fusednorm
    layer_options: list[dict[str, Any]] = [
        {}, {"eps": 0.125}, {"weight_offset": 1.0}, {"eps_outside": True}, {"unbiased": True}
    ]  # fmt: skip
    rms_options: list[dict[str, Any]] = [
        {}, {"eps": 0.125}, {"weight_offset": 1.0}, {"casting_mode": "llama"}
    ]  # fmt: skip
    for centered, options_list in ((True, layer_options), (False, rms_options)):
        name = "layer_norm" if centered else "rms_norm"
        bias_cases = (True, False) if centered else (False,)
        for dtype, options in itertools.product(DTYPES, options_list):
            for has_weight, has_bias in itertools.product((True, False), bias_cases):
                plain = has_weight and has_bias == centered
                for how in ("plain", "strided", "transposed", "offset", "extreme", "constant"):
                    if how != "plain" and (options and list(options) != ["eps_outside"] or not plain):
                        continue
                    shapes = SHAPES if plain and how == "plain" else FEW

                    def case(
                        shape: tuple[int, ...],
                        wanted: list[bool],
                        dtype: torch.dtype = dtype,
                        weight_dtype: torch.dtype | None = None,
                        options: dict[str, Any] = options,
                        has_weight: bool = has_weight,
                        has_bias: bool = has_bias,
                        how: str = how,
                        name: str = name,
                        centered: bool = centered,
                        out_dtype: torch.dtype | None = None,
                    ) -> list[Tensor | None]:
                        cols = shape[-1:]
                        if options.get("unbiased") and cols == (1,):
                            return []
                        wd = weight_dtype or dtype
                        x = laid_out(numbers(1, shape, dtype), how)
                        w = numbers(2, cols, wd) if has_weight else None
                        b = numbers(3, cols, wd) if has_bias else None
                        rest = dict(options)
                        eps = rest.pop("eps", 1e-5 if centered else None)
                        suffix = ""
                        if out_dtype is not None:
                            suffix, rest["out_dtype"] = "_forward", out_dtype
                        op = getattr(ops, name + suffix)

                        def call(op: Any, x: Tensor, w: Tensor | None, b: Tensor | None) -> Any:
                            args = (x, cols, w, b, eps) if centered else (x, cols, w, eps)
                            result = op(*args, **rest)
                            return result if out_dtype is None else result[0]

                        return outputs_and_gradients(op, [x, w, b], wanted, call)

                    label = " ".join(
                        [name, SHORT[dtype], how, "w" * has_weight + "b" * has_bias or "-"]
                        + [f"{k}={v}" for k, v in options.items()]
                    )
                    yield (
                        label,
                        [lambda s=s, c=case: c(s, [True] * 3) for s in shapes],  # type: ignore[misc]
                    )
                    if plain and how == "plain":
                        masks = [list(m) for m in itertools.product((False, True), repeat=3)]
                        yield (
                            label + " masks",
                            [lambda m=m, s=s, c=case: c(s, m) for m in masks for s in FEW[:2]],  # type: ignore[misc]
                        )
                        if not options:
                            yield (
                                label + " weight dtypes",
                                [
                                    lambda d=d, s=s, c=case: c(s, [True] * 3, weight_dtype=d)  # type: ignore[misc]
                                    for d in DTYPES
                                    for s in FEW
                                ],
                            )
                            if LARGE:
                                yield (
                                    label + " large",
                                    [lambda s=s, c=case: c(s, [True] * 3) for s in LARGE],  # type: ignore[misc]
                                )
                        if dtype in (BF16, F16):
                            yield (
                                label + " to f32",
                                [
                                    lambda s=s, c=case: c(s, [True] * 3, out_dtype=F32)  # type: ignore[misc]
                                    for s in FEW
                                ],
                            )


def add_cases() -> Iterator[tuple[str, list[Case]]]:
    ops = torch.ops.fusednorm
    options_of: dict[str, list[dict[str, Any]]] = {
        "add_layer_norm": [
            {},
            {"alpha": 0.5},
            {"eps_outside": True},
            {"weight_offset": 1.0, "unbiased": True},
        ],
        "add_rms_norm": [{}, {"alpha": 0.5}, {"weight_offset": 1.0}, {"casting_mode": "llama"}],
    }
    for name, options_list in options_of.items():
        centered = name == "add_layer_norm"
        for dtype, residual_dtype, options in itertools.product(DTYPES, DTYPES, options_list):

            def case(
                shape: tuple[int, ...],
                wanted: list[bool],
                in_place: bool = False,
                name: str = name,
                centered: bool = centered,
                dtype: torch.dtype = dtype,
                residual_dtype: torch.dtype = residual_dtype,
                options: dict[str, Any] = options,
            ) -> list[Tensor | None]:
                cols = shape[-1:]
                x, r = numbers(1, shape, dtype), numbers(4, shape, residual_dtype)
                w, b = numbers(2, cols, dtype), numbers(3, cols, dtype) if centered else None

                def call(op: Any, x: Tensor, r: Tensor, w: Tensor, b: Tensor | None) -> Any:
                    args = (x, r, cols, w, b, 1e-5) if centered else (x, r, cols, w, None)
                    return op(*args, **options)

                if in_place:
                    with torch.no_grad():
                        return [call(getattr(ops, name + "_"), x, r, w, b), r]
                return outputs_and_gradients(getattr(ops, name), [x, r, w, b], wanted, call)

            label = " ".join(
                [name, SHORT[dtype], SHORT[residual_dtype]] + [f"{k}={v}" for k, v in options.items()]
            )
            shapes = SHAPES[2:] if not options else FEW
            yield label, [lambda s=s, c=case: c(s, [True] * 4) for s in shapes]  # type: ignore[misc]
            yield label + " in place", [lambda s=s, c=case: c(s, [], True) for s in FEW]  # type: ignore[misc]
            if not options and (dtype == residual_dtype or residual_dtype == F32):
                masks = [list(m) for m in itertools.product((False, True), repeat=4)]
                yield label + " masks", [lambda m=m, c=case: c(FEW[1], m) for m in masks]  # type: ignore[misc]
                if LARGE:
                    yield label + " large", [lambda s=s, c=case: c(s, [True] * 4) for s in LARGE]  # type: ignore[misc]


def other_cases() -> Iterator[tuple[str, list[Case]]]:
    ops = torch.ops.fusednorm
    for dtype in DTYPES:

        def scale(shape: tuple[int, ...], g_dtype: torch.dtype, dtype: torch.dtype = dtype) -> Any:
            x, g = numbers(1, shape, dtype), numbers(2, (1,), g_dtype)
            x[0] = 0
            return outputs_and_gradients(ops.scale_norm, [x, g], [True] * 2, lambda op, x, g: op(x, g, 1e-3))

        yield (
            f"scale_norm {SHORT[dtype]}",
            [lambda s=s, d=d, c=scale: c(s, d) for s in FEW for d in DTYPES],  # type: ignore[misc]
        )
        if SIMT:  # on CUDA group_norm is the row kernels and ATen
            continue
        for last, affine in itertools.product((False, True), (True, False)):

            def group(
                shape: tuple[int, ...],
                groups: int,
                dtype: torch.dtype = dtype,
                last: bool = last,
                affine: bool = affine,
            ) -> Any:
                x = numbers(1, shape, dtype)
                if last:
                    x = x.to(memory_format=torch.channels_last)
                w, b = ((numbers(i, shape[1:2], dtype) if affine else None) for i in (2, 3))
                return outputs_and_gradients(
                    ops.group_norm, [x, w, b], [True] * 3, lambda op, x, w, b: op(x, groups, w, b, 1e-5)
                )

            shapes = [((2, 6, 5, 7), 3), ((3, 32, 8, 8), 8), ((1, 64, 1, 1), 4), ((2, 320, 16, 16), 32)]
            shapes += [((2, 8, 3, 3), 8), ((4, 320, 64, 64), 32)]
            yield (
                f"group_norm {SHORT[dtype]} {'last' if last else 'first'} {'wb' if affine else '-'}",
                [lambda s=s, g=g, c=group: c(s, g) for s, g in shapes],  # type: ignore[misc]
            )


def composite_cases() -> Iterator[tuple[str, list[Case]]]:
    """What ATen computes: tangents, derivatives of backward, vmap."""
    f = torch.ops.fusednorm

    def functions(shape: tuple[int, ...]) -> dict[str, tuple[Callable[..., Any], int]]:
        cols = shape[-1:]
        return {
            "layer_norm": (lambda x, w, b: f.layer_norm(x, cols, w, b, 1e-5), 3),
            "layer_norm eps_outside": (
                lambda x, w, b: f.layer_norm(x, cols, w, b, 1e-5, eps_outside=True),
                3,
            ),
            "rms_norm": (lambda x, w: f.rms_norm(x, cols, w, weight_offset=1.0), 2),
            "rms_norm llama": (lambda x, w: f.rms_norm(x, cols, w, casting_mode="llama"), 2),
            "add_layer_norm": (lambda x, w, b, r: f.add_layer_norm(x, r, cols, w, b, alpha=0.5)[0], 4),
            "add_rms_norm": (lambda x, w, b, r: f.add_rms_norm(x, r, cols, w)[0], 4),
            "group_norm": (lambda x, w, b: f.group_norm(x, 1, w[: x.shape[1]], b[: x.shape[1]]), 3),
        }

    def case(name: str, shape: tuple[int, ...], dtype: torch.dtype, transform: str) -> list[Tensor | None]:
        function, count = functions(shape)[name]
        x, w, b, r = (numbers(i, s, dtype) for i, s in enumerate((shape, shape[-1:], shape[-1:], shape)))
        args = (x, w, b, r)[:count]
        if transform == "jvp":
            tangents = tuple(numbers(20 + i, tuple(a.shape), dtype) for i, a in enumerate(args))
            return list(torch.func.jvp(function, args, tangents))
        if transform == "vmap":
            return [
                torch.func.vmap(function, (0,) + (None,) * (count - 1 - (count == 4)) + (0,) * (count == 4))(
                    *args
                )
            ]
        leaves = [a.requires_grad_() for a in args]
        y = function(*leaves)
        first = torch.autograd.grad((y * y).sum(), leaves, create_graph=True, allow_unused=True)
        total = sum((g * g).sum() for g in first if g is not None)
        return list(torch.autograd.grad(total, leaves, allow_unused=True))  # type: ignore[arg-type]

    for name in functions((2, 3, 16)):
        for dtype, transform in itertools.product((F64, F32, BF16), ("jvp", "vmap", "double backward")):
            yield (
                f"composites {name} {SHORT[dtype]} {transform}",
                [lambda n=name, d=dtype, t=transform: case(n, (2, 3, 16), d, t)],  # type: ignore[misc]
            )


def hashes(only: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """A line of hashes for each group of cases, or for those of ``only``."""
    sources = [row_norm_cases(), add_cases(), other_cases()] + ([] if SIMT else [composite_cases()])
    for label, cases in itertools.chain(*sources):
        if only is None or label in only:
            yield label, " ".join(digest(case()) for case in cases)


def instruction_set() -> str:
    """What the hashes belong to."""
    return "simt" if SIMT else str(fusednorm.build_info()["cpu_kernels"])


def differences(recorded: dict[str, Any], only: Collection[str] | None = None) -> tuple[list[str], int]:
    """The groups of cases whose bits are not the recorded ones, and how many hashes were compared."""
    wrong, compared = [], 0
    same_torch = recorded["torch"] == torch.__version__
    for label, line in hashes(only):
        if label.startswith("composites") and not same_torch:
            continue
        expected = recorded["hashes"].get(label, "not recorded")
        compared += line.count(" ") + 1
        if line != expected:
            wrong.append(f"{label}: expected {expected}, got {line}")
    return wrong, compared


def main() -> None:
    """Records or checks this instruction set's hashes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the file")
    action.add_argument("--record", action="store_true", help="write this instruction set's hashes")
    parser.add_argument("--file", type=Path, default=PATH)
    args = parser.parse_args()
    if SIMT:
        torch.ops.load_library(os.environ["FUSEDNORM_SIMT_LIBRARY"])
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    name = instruction_set()
    if args.record:
        known[name] = {"torch": torch.__version__, "hashes": dict(hashes())}
        args.file.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
        count = sum(line.count(" ") + 1 for line in known[name]["hashes"].values())
        print(f"{name}: {count} hashes recorded in {args.file}")
        return
    if name not in known:
        sys.exit(f"{name}: no hashes recorded in {args.file}; record them with a build known to be right")
    wrong, compared = differences(known[name])
    print("\n".join(wrong))
    print(f"{name}: {len(wrong)} lines differ; {compared} hashes compared")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
