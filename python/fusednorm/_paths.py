"""Import paths: names that load when they are first asked for, and the module names of 0.1.0."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Where the modules of 0.1.0 are now. People's imports and pickles name them.
MOVED = {
    "_columns": "modules.columns",
    "_load": "torch_support.loading",
    "_recomputation": "torch_support.recomputation",
    "_subclasses": "torch_support.subclasses",
    "adaptive_norm": "modules.adaptive_norm",
    "add_modules": "modules.add",
    "column_norms": "modules.batch_norm",
    "decompositions": "torch_support.decompositions",
    "deepnorm": "placement.deepnorm",
    "distributed": "torch_support.dtensor",
    "group_functional": "functional.groups",
    "group_modules": "modules.groups",
    "head_norm": "modules.head_norm",
    "monitor": "training.monitor",
    "monitor_report": "training.report",
    "monitor_statistics": "training.statistics",
    "power_norm": "modules.power_norm",
    "scale_norm": "modules.scale_norm",
    "stack": "placement.stack",
    "warmup": "training.warmup",
}


class _Moved(MetaPathFinder, Loader):
    """Imports a module of 0.1.0 as the one that it is now: the same object under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == "fusednorm" and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.rpartition(".")[2]
        sys.modules[module.__name__] = importlib.import_module(f"fusednorm.{MOVED[old]}")


def keep_old_paths() -> None:
    """Lets the old names be imported. Those of modules that are loaded are ready at once."""
    package = sys.modules["fusednorm"]
    for old, new in MOVED.items():
        module = sys.modules.get(f"fusednorm.{new}")
        if module is not None:
            sys.modules[f"fusednorm.{old}"] = module
            package.__dict__.setdefault(old, module)  # decompositions is a function, too
    sys.meta_path.append(_Moved())


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: what it offers without having loaded it, by the module that has it.

    A name that is its own home is a module.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        value = module if name == homes[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find
