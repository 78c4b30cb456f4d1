"""Names of 0.1.0, when Python's part was flat, still import and unpickle; and imports run one way."""

import ast
import functools
import importlib
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusednorm
from fusednorm.placement import deepnorm_constants

# What 0.1.0 had, by module, and where that is now. Private names are those that its pickles hold.
FLAT = {
    "_columns": ("modules.columns", "Moments accumulation_type all_reduce check_input moments real_sum"),
    "_load": ("torch_support.loading", "VERSION _C build_info cmake_prefix_path library_path"),
    "_recomputation": ("torch_support.recomputation", "Run Runs recomputing"),
    "_subclasses": ("torch_support.subclasses", "prepare_for_subclass refuse_nested"),
    "adaptive_norm": ("modules.adaptive_norm", "AdaptiveNorm"),
    "add_modules": ("modules.add", "AddLayerNorm AddRMSNorm"),
    "column_norms": ("modules.batch_norm", "BatchNorm"),
    "decompositions": ("torch_support.decompositions", "decompositions"),
    "deepnorm": ("placement.deepnorm", "deepnorm_init"),
    "distributed": ("torch_support.dtensor", "register"),
    "functional": (
        "functional",
        "add_layer_norm add_rms_norm group_norm instance_norm layer_norm rms_norm scale_norm",
    ),
    "group_functional": ("functional.groups", "group_norm instance_norm"),
    "group_modules": ("modules.groups", "GroupNorm InstanceNorm"),
    "head_norm": ("modules.head_norm", "HeadNorm"),
    "modules": ("modules", "LayerNorm RMSNorm"),
    "monitor": ("training.monitor", "NormMonitor _Hook _ignore"),
    "monitor_report": ("training.report", "NormReport Outlier plot table to_json write_scalars"),
    "monitor_statistics": (
        "training.statistics",
        "SERIES ColumnStatistics Sample Watched features_of is_ours",
    ),
    "placement": (
        "placement",
        "DeepNormConstants Residual add_branch add_norm deepnorm_constants is_called_as",
    ),
    "plans": ("plans", "explain"),
    "power_norm": ("modules.power_norm", "PowerNorm"),
    "scale_norm": ("modules.scale_norm", "ScaleNorm"),
    "stack": ("placement.stack", "ResidualStack"),
    "warmup": ("training.warmup", "NormWarmup _EpsHook _LambdaHook _Schedule"),
}


@pytest.mark.parametrize("old", FLAT)
def test_old_module_is_the_new_one(old: str) -> None:
    new, names = FLAT[old]
    here = importlib.import_module(f"fusednorm.{new}")
    assert importlib.import_module(f"fusednorm.{old}") is here
    assert here.__name__ == f"fusednorm.{new}" and here.__spec__ and here.__spec__.name == here.__name__
    if old != "decompositions":  # as an attribute it has always been the function
        assert getattr(fusednorm, old) is here
    for name in names.split():
        assert hasattr(here, name), name
        public = getattr(fusednorm, name, None) if name in fusednorm.__all__ else getattr(here, name)
        assert public is getattr(here, name), name


@pytest.mark.parametrize(
    "code",
    [
        "import fusednorm.monitor, fusednorm.decompositions; len(fusednorm.decompositions())",
        "from fusednorm.power_norm import PowerNorm; import fusednorm.stack; fusednorm.warmup.NormWarmup",
        "import fusednorm as f; f.distributed.register, f.modules.AdaptiveNorm, f.training",
        "from fusednorm import *; NormMonitor, AdaptiveNorm",
    ],
)
def test_first_import_of_a_process(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_loads_nothing_that_takes_long() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import fusednorm\n"
        "new = set(sys.modules) - before\n"
        "slow = 'torch._dynamo', 'torch.distributed.tensor', 'matplotlib', 'numpy', 'fusednorm.training'\n"
        "assert new and not new.intersection(slow), new.intersection(slow)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_errors() -> None:
    for package in (fusednorm, fusednorm.modules):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
            getattr(package, "nothing")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match="fusednorm.nothing"):
        importlib.import_module("fusednorm.nothing")


def _warming(mode: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(fusednorm.LayerNorm(4), fusednorm.RMSNorm(4))
    return model, fusednorm.NormWarmup(model, 10, mode)


def _watched() -> tuple[nn.Module, Any]:
    model = nn.Sequential(fusednorm.RMSNorm(4))
    monitor = fusednorm.NormMonitor(model, every=1)
    model(torch.ones(2, 4))
    return model, monitor.report()


def _seen(norm: nn.Module) -> nn.Module:
    norm(torch.ones(3, 4))
    return norm


PICKLED: dict[str, Any] = {
    "LayerNorm": lambda: fusednorm.LayerNorm(4, weight_offset=1.0),
    "RMSNorm": lambda: fusednorm.RMSNorm(4, casting_mode="llama"),
    "AddLayerNorm": lambda: fusednorm.AddLayerNorm(4, alpha=2.0),
    "AddRMSNorm": lambda: fusednorm.AddRMSNorm(4),
    "GroupNorm": lambda: fusednorm.GroupNorm(2, 4),
    "InstanceNorm": lambda: fusednorm.InstanceNorm(4),
    "BatchNorm": lambda: _seen(fusednorm.BatchNorm(4)),
    "PowerNorm": lambda: _seen(fusednorm.PowerNorm(4)),
    "ScaleNorm": lambda: fusednorm.ScaleNorm(4),
    "HeadNorm": lambda: fusednorm.HeadNorm(2, 4),
    "AdaptiveNorm": lambda: fusednorm.AdaptiveNorm(fusednorm.LayerNorm(4)),
    "Residual": lambda: fusednorm.Residual(nn.Linear(4, 4), fusednorm.RMSNorm(4), "deep", 2.0),
    "ResidualStack": lambda: fusednorm.ResidualStack(
        [fusednorm.Residual(nn.Linear(4, 4), fusednorm.RMSNorm(4))], fusednorm.LayerNorm(4)
    ),
    "NormWarmup, lambda": lambda: _warming("lambda"),
    "NormWarmup, eps": lambda: _warming("eps"),
    "NormMonitor": _watched,
    "DeepNormConstants": lambda: deepnorm_constants(4),
    "function": lambda: functools.partial(fusednorm.functional.layer_norm, eps=1e-3),
}


def _classes(stream: bytes) -> list[Any]:
    return [argument for code, argument, _ in pickletools.genops(stream) if code.name == "GLOBAL"]


@pytest.mark.parametrize("case", PICKLED)
def test_pickle_of_0_1_0_loads(case: str) -> None:
    """Today's stream under the names of 0.1.0: protocol 2, as torch.save has it, spells them as lines."""
    made = PICKLED[case]()
    stream = pickle.dumps(made, protocol=2)
    old_stream, replaced = stream, 0
    for old, (new, names) in FLAT.items():
        for name in names.split():
            for module in (f"fusednorm.{new}", "fusednorm", "fusednorm.training", "fusednorm.training.hooks"):
                now = f"c{module}\n{name.lstrip('_') if module.endswith('hooks') else name}\n".encode()
                if now in old_stream:
                    old_stream = old_stream.replace(now, f"cfusednorm.{old}\n{name}\n".encode())
                    replaced += 1
    assert replaced and b"cfusednorm\n" not in old_stream and b"cfusednorm.training." not in old_stream
    again = pickle.dumps(pickle.loads(old_stream), protocol=2)
    assert _classes(again) == _classes(stream)


def test_classes_are_pickled_by_their_public_path() -> None:
    """Not by the file that they are in, which may move again."""
    for name in fusednorm.__all__:
        value = getattr(fusednorm, name)
        if isinstance(value, type):
            assert value.__module__ == "fusednorm" and value.__qualname__ == name
    for name in fusednorm.functional.__all__:
        assert getattr(fusednorm.functional, name).__module__ == "fusednorm.functional"


PYTHON = Path(__file__).resolve().parent.parent / "python"


def test_every_public_name_is_in_the_readme() -> None:
    text = (PYTHON / "README.md").read_text()
    for package in (fusednorm, fusednorm.functional, fusednorm.training):
        assert [name for name in package.__all__ if f"`{name}`" not in text] == []


ROOMS = {  # by what each may import
    "torch_support": set(),
    "functional": {"torch_support"},
    "modules": {"functional", "torch_support"},
    "placement": {"modules", "functional", "torch_support"},
    "training": {"modules", "functional", "torch_support"},
}  # fmt: skip


def test_imports_run_one_way() -> None:
    source = PYTHON / "fusednorm"
    assert {path.parent.name for path in source.glob("*/*.py")} == set(ROOMS)
    for path in source.glob("*/*.py"):
        room = path.parent.name
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            for name in imported:
                first, _, rest = name.partition(".")
                allowed = ROOMS[room] | {room, "_paths"}
                assert first != "fusednorm" or rest.split(".")[0] in allowed, f"{path}: {name}"
