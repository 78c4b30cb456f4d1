"""Which modules of a model are norms, torch's and this package's, and where their features are."""

from collections.abc import Iterator

from torch import nn

__all__ = ["features_of", "find_norms", "is_ours"]

_FEATURES_LAST = (nn.LayerNorm, nn.RMSNorm)
_FEATURES_SECOND = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


def is_ours(cls: type) -> bool:
    """Whether a class is one of this package's norms."""
    return cls.__module__.partition(".")[0] == "fusednorm" and cls.__name__.endswith("Norm")


def features_of(module: nn.Module) -> str | None:
    """Whether a norm's features are the "last" dimensions or the "second" one; None where it is no norm."""
    for cls in type(module).__mro__:  # the nearest known class decides: our BatchNorm has its features last
        if is_ours(cls):
            return "second" if cls.__name__ in ("GroupNorm", "InstanceNorm") else "last"
        if cls in _FEATURES_LAST:
            return "last"
        if cls in _FEATURES_SECOND:
            return "second"
    return None


def find_norms(
    model: nn.Module, also: tuple[type[nn.Module], ...] = ()
) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and place of the features of every norm, but for norms within norms; and of ``also``."""
    inside: list[str] = []  # prefixes of names within a norm
    for name, module in model.named_modules():
        features = features_of(module)
        if features is not None and not name.startswith(tuple(inside)):
            yield name, module, features
            inside.append(f"{name}." if name else "")
        elif features is None and isinstance(module, also):
            yield name, module, "last"
