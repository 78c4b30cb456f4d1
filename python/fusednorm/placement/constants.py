"""DeepNorm's constants: what depth makes of the residual and of the initialisation."""

from typing import NamedTuple

__all__ = ["DeepNormConstants", "deepnorm_constants"]


class DeepNormConstants(NamedTuple):
    """``alpha`` scales the residual stream, ``beta`` is the gain of the initialisation."""

    alpha: float
    beta: float


DeepNormConstants.__module__ = "fusednorm.placement"  # what pickles call it


def deepnorm_constants(
    layers: int | None = None,
    *,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    part: str | None = None,
) -> DeepNormConstants:
    """DeepNorm's constants by depth (Wang et al. 2022, table 1).

    A layer is a Transformer layer: its attention and its feed-forward, two :class:`Residual`, count as one.

    Args:
        layers: the depth L of an encoder-only or decoder-only model: alpha ``(2 L)**(1/4)``,
            beta ``(8 L)**(-1/4)``.
        encoder_layers, decoder_layers: the depths N and M of a model with both, and
        part: which of the two. "encoder": alpha ``0.81 (N**4 M)**(1/16)``, beta
            ``0.87 (N**4 M)**(-1/16)``; "decoder": alpha ``(3 M)**(1/4)``, beta ``(12 M)**(-1/4)``.

    Raises:
        ValueError: neither ``layers`` nor both of the others, or all; a depth below 1; another part.
    """
    both = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    given = {name: depth for name, depth in {"layers": layers, **both}.items() if depth is not None}
    if list(given) not in (["layers"], list(both)):
        raise ValueError(
            "fusednorm: DeepNorm: expected layers, or encoder_layers and decoder_layers, "
            f"got {', '.join(given) or 'neither'}"
        )
    for name, depth in given.items():
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"fusednorm: DeepNorm: {name}: expected an integer of 1 or more, got {depth!r}")
    parts = ("encoder", "decoder") if layers is None else (None,)
    if part not in parts:
        expected = '"encoder" or "decoder"' if layers is None else "none beside layers"
        raise ValueError(f"fusednorm: DeepNorm: part: expected {expected}, got {part!r}")
    if layers is not None:
        return DeepNormConstants((2 * layers) ** 0.25, (8 * layers) ** -0.25)
    encoder, decoder = given["encoder_layers"], given["decoder_layers"]
    if part == "decoder":
        return DeepNormConstants((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)
    depth = (encoder**4 * decoder) ** 0.0625
    return DeepNormConstants(0.81 * depth, 0.87 / depth)
