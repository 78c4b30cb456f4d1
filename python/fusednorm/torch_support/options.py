"""The options of the row norms in Python, made from their one declaration: csrc/operators/options.h.

Functions and modules take ``**options``; :func:`takes` and :func:`module_of` give them the signature and the
documentation that the declaration asks for. A new option needs nothing here, in functional or in modules.
"""

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from fusednorm.torch_support.loading import _C

__all__ = ["LAYER_NORM", "RMS_NORM", "Options", "module_of", "takes"]

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Options:
    """The options of a norm, in the order of its operators' schemas."""

    def __init__(self, declared: list[tuple[str, Any, tuple[str, ...], str]]) -> None:
        self.defaults: dict[str, Any] = {name: default for name, default, _, _ in declared}
        self.choices = {name: choices for name, _, choices, _ in declared if choices}
        self.sentences = {name: sentence for name, _, _, sentence in declared}
        self._values = attrgetter(*self.defaults)

    def values_of(self, module: Any) -> tuple[Any, ...]:
        """The options that are a module's attributes, in order."""
        values: tuple[Any, ...] = self._values(module)
        return values

    def of(self, module: Any) -> dict[str, Any]:
        """The options that are a module's attributes, by name."""
        return {name: getattr(module, name) for name in self.defaults}

    def set(self, module: Any, given: dict[str, Any]) -> None:
        """Makes attributes of the options that a constructor was given."""
        kind = type(module).__name__
        for name, value in given.items():
            if name not in self.defaults:
                raise TypeError(f"{kind}.__init__() got an unexpected keyword argument {name!r}")
            if name in self.choices and value not in self.choices[name]:
                expected = " or ".join(f'"{choice}"' for choice in self.choices[name])
                raise ValueError(f"fusednorm.{kind}: {name}: expected {expected}, got {value!r}")
            setattr(module, name, value)

    def parameters(self) -> list[inspect.Parameter]:
        """As keyword-only parameters of a signature."""
        kind = inspect.Parameter.KEYWORD_ONLY
        return [
            inspect.Parameter(name, kind, default=default, annotation=type(default))
            for name, default in self.defaults.items()
        ]

    def documentation(self, indent: int) -> str:
        """A paragraph of ``Args`` for each."""
        return f"\n{' ' * indent}".join(f"{name}: {text}" for name, text in self.sentences.items())


def _signature(function: Callable[..., Any], options: Options) -> inspect.Signature:
    """The function's, with the options in place of ``**options``."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return signature.replace(parameters=[*kept, *options.parameters()])


def takes(options: Options) -> Callable[[Decorated], Decorated]:
    """For a function with ``**options``: their names and defaults; sentences where it says ``OPTIONS``."""

    def decorate(function: Decorated) -> Decorated:
        function.__signature__ = _signature(function, options)  # type: ignore[attr-defined]
        if function.__doc__:
            function.__doc__ = function.__doc__.replace("OPTIONS", options.documentation(8))
        return function

    return decorate


Module = TypeVar("Module", bound=type)


def module_of(options: Options) -> Callable[[Module], Module]:
    """For a module class whose constructor has ``**options``: they are attributes, with class-wide defaults.

    The defaults serve a module that became ours by its class alone.
    """

    def decorate(module: Module) -> Module:
        for name, default in options.defaults.items():
            if not hasattr(module, name):
                setattr(module, name, default)
        init: Any = module.__init__  # type: ignore[misc]
        init.__signature__ = _signature(init, options)
        return module

    return decorate


LAYER_NORM = Options(_C.layer_norm_options)
RMS_NORM = Options(_C.rms_norm_options)
