"""A hook that is not compiled, and that a copy of the model does not take along."""

from typing import Any

import torch

__all__ = ["Hook", "ignore"]


class Hook:
    """Calls a method of the monitor. In a copy or a pickle of the model it does nothing."""

    def __init__(self, method: Any, *arguments: Any) -> None:
        self.method, self.arguments = method, arguments

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *arguments: Any) -> None:
        self.method(*self.arguments, *arguments)

    def __reduce__(self) -> Any:
        return Hook, (ignore,)


def ignore(*_: Any) -> None:
    pass
