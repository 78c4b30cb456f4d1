"""Shared by all tests: both norms behind one interface, a fixed seed, and the device."""

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
import reference
from fusednorm import functional

TEST_DEVICE = os.environ.get("FUSEDNORM_TEST_DEVICE")

# The library of tests/simt/: from here on the CPU key runs the CUDA kernels, thread by thread.
SIMT_LIBRARY = os.environ.get("FUSEDNORM_SIMT_LIBRARY")
if SIMT_LIBRARY:
    warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
    torch.ops.load_library(SIMT_LIBRARY)


# What depends on a CPU's caches, at sizes that the executor would take minutes for.
of_the_cpu = pytest.mark.skipif(bool(SIMT_LIBRARY or TEST_DEVICE), reason="of the CPU's kernels")

SIMT_FULL = bool(os.environ.get("FUSEDNORM_SIMT_FULL"))  # make test-simt


def simt_launches() -> int:
    """How many CUDA kernels the host has executed so far."""
    function = ctypes.CDLL(SIMT_LIBRARY).fusednorm_simt_launches
    function.restype = ctypes.c_uint64
    return int(function())


@pytest.fixture(autouse=True)
def _record_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """For --junitxml: whether a test showed anything of the CUDA kernels (family.py)."""
    before = simt_launches() if SIMT_LIBRARY else 0
    yield
    if SIMT_LIBRARY:
        request.node.user_properties.append(("launches", simt_launches() - before))


# These start processes that meet at a port, or use a fixture of their file that costs a build or a training:
# a file's tests stay in one worker.
WHOLE_FILES = (
    "packaging",
    "gallery",
    "gpu_check",
    "bench",
    "cuda_code",
    "distributed",
    "column_norms",
    "bits",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem.removeprefix("test_")
        if name in WHOLE_FILES:
            item.add_marker(pytest.mark.xdist_group(name))


@dataclass(frozen=True)
class NormUnderTest:
    """A norm as function, reference, operators and module; bias is ignored where there is none."""

    name: str
    has_bias: bool
    eps: float
    function: Callable[..., Tensor] = field(repr=False)
    torch_function: Callable[..., Tensor] = field(repr=False)
    module: type = field(repr=False)
    torch_module: type = field(repr=False)

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int = 1, **kw: Any
    ) -> Tensor:
        parameters = (weight, bias) if self.has_bias else (weight,)
        return self.function(x, x.shape[x.dim() - dims :], *parameters, kw.pop("eps", self.eps), **kw)

    def reference(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int = 1, **kw: Any
    ) -> Tensor:
        parameters = (weight, bias) if self.has_bias else (weight,)
        function = getattr(reference, self.name)
        return function(x, *parameters, kw.pop("eps", self.eps), dims, **kw)

    def op(self, suffix: str = "") -> Any:
        return getattr(torch.ops.fusednorm, self.name + suffix).default


NORMS = [
    NormUnderTest(
        "layer_norm", True, 1e-5, functional.layer_norm, F.layer_norm, fusednorm.LayerNorm, torch.nn.LayerNorm
    ),
    NormUnderTest(
        "rms_norm", False, 1e-6, functional.rms_norm, F.rms_norm, fusednorm.RMSNorm, torch.nn.RMSNorm
    ),
]


@pytest.fixture(params=NORMS, ids=[norm.name for norm in NORMS])
def norm(request: pytest.FixtureRequest) -> NormUnderTest:
    """Each of the norms."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    torch.manual_seed(20261130)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _default_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``FUSEDNORM_TEST_DEVICE=cuda``: tests that name no device (values, guarantees) run on that one.

    Random numbers are the CPU's all the same: some limits fit those and not any. A default device is a
    mode, for which the fast entry steps aside; test_cuda.py names its device and takes it.
    """
    if not TEST_DEVICE:
        yield
        return
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **kw: randn(*a, **kw, device="cpu").to(TEST_DEVICE))
    torch.set_default_device(TEST_DEVICE)
    yield
    torch.set_default_device(None)
