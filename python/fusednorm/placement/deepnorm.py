"""DeepNorm's initialisation (Wang et al. 2022) of models of torch's modules, of ours, or of usual names."""

from collections.abc import Iterator

from torch import Tensor, nn

from fusednorm.placement.constants import DeepNormConstants, deepnorm_constants
from fusednorm.placement.residual import Residual

__all__ = ["deepnorm_init"]

# How the dotted names of linear layers end, by what they project to. A packed projection ("qkv", "kv") holds
# its parts one after another in its output features.
_ENDINGS: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "q", "wq", "to_q", "q_lin"),
    "k": ("k_proj", "key", "k", "wk", "to_k", "k_lin"),
    "v": ("v_proj", "value", "v", "wv", "to_v", "v_lin"),
    "qkv": ("qkv", "qkv_proj", "c_attn", "wqkv", "to_qkv", "in_proj"),
    "kv": ("kv_proj", "to_kv"),
    "output": ("o_proj", "out_proj", "c_proj", "o", "wo", "to_out", "out_lin", "attn.proj", "output.dense"),
    "feed-forward": (
        "fc1", "fc2", "linear1", "linear2", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2",
        "w3", "wi", "wi_0", "wi_1", "c_fc", "fc_in", "fc_out", "lin1", "lin2", "intermediate.dense",
    ),
}  # fmt: skip
_FEED_FORWARDS = {"mlp", "ffn", "ff", "feed_forward", "feedforward"}  # any linear layer under such a name


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Hugging Face's ``Conv1D``: a linear layer with a weight of ``[in, out]``."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def _role(path: str, in_sublayer: bool) -> str | None:
    for role, endings in _ENDINGS.items():
        if any(f".{path}".lower().endswith(f".{ending}") for ending in endings):
            return role
    if in_sublayer or _FEED_FORWARDS.intersection(path.lower().split(".")[:-1]):
        return "feed-forward"
    return None


def _parts(name: str, weight: Tensor, role: str, dim: int) -> dict[str, Tensor]:
    """The weight by role: itself, or the parts of a packed projection."""
    if role not in ("qkv", "kv"):
        return {role: weight}
    if weight.shape[dim] != len(role) * weight.shape[1 - dim]:
        raise ValueError(
            f"fusednorm.deepnorm_init: {name}: expected {', '.join(role)} of equal, square shapes in "
            f"one weight, got shape {list(weight.shape)}; initialise it by its parts"
        )
    return dict(zip(role, weight.chunk(len(role), dim), strict=True))


def _projections(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Path, weight name and parts of every linear projection; no parts where the role is unknown."""
    sublayers = [module.sublayer for module in model.modules() if isinstance(module, Residual)]
    in_sublayer = {module for sublayer in sublayers for module in sublayer.modules()}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                parts = dict(zip("qkv", module.in_proj_weight.detach().chunk(3), strict=True))
                yield path, f"{prefix}in_proj_weight", parts
            else:
                for letter in "qkv":
                    name = f"{letter}_proj_weight"
                    yield path, f"{prefix}{name}", {letter: getattr(module, name).detach()}
        elif _is_linear(module):
            role = _role(path, module in in_sublayer)
            weight: Tensor = module.weight.detach()
            dim = 1 if _is_transposed(module) else 0
            name = f"{prefix}weight"
            yield path, name, _parts(name, weight, role, dim) if role else {}


def _part_of(path: str) -> str | None:
    """The outermost name with "encoder" or "decoder" in it; ``decoder.0.encoder_attn`` is the decoder's."""
    for name in path.lower().split("."):
        if ("encoder" in name) != ("decoder" in name):
            return "encoder" if "encoder" in name else "decoder"
    return None


def deepnorm_init(
    model: nn.Module,
    layers: int | None = None,
    *,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    part: str | None = None,
) -> dict[str, str]:
    """Initialises a model as DeepNorm has it, and sets alpha where a :class:`Residual` has one.

    Feed-forward, value and output projections get Xavier-normal weights of gain beta, query and key of
    gain 1; alpha and beta are :func:`fusednorm.placement.deepnorm_constants`. Biases, norms and embeddings
    are left alone.

    Projections are ``nn.MultiheadAttention``'s (of a packed ``in_proj_weight`` each of q, k and v as a matrix
    of its own); linear layers of the usual names (``q_proj``, ``qkv``, ``c_attn``, ``out_proj``, ``fc1``,
    ``linear1``, ``gate_proj``, ...) or under ``mlp``, ``ffn``, ``ff``, ``feed_forward``; and any further
    linear layer of a :class:`Residual`'s sublayer, as a feed-forward. ``Residual(placement="deep")`` gets
    alpha, whatever it had; other layers, torch's among them, have to scale their residual themselves.

    Args:
        model: changed in place, with torch's default generator.
        layers: depth of an encoder-only or decoder-only model, in Transformer layers.
        encoder_layers, decoder_layers: depths of a model with both. Which one a module belongs to is read
            from "encoder" or "decoder" in its name, or given as
        part: "encoder" or "decoder", all of ``model``.

    Returns:
        What was done, by name: the gains of every linear layer's weight, or that it was left as it is, and
        the alphas. To be read: a projection of an unknown name is among those that were left.

    Raises:
        ValueError: nothing to initialise; depths that do not fit; a packed projection whose parts are not
            square and equal (grouped queries); a module of neither encoder nor decoder. The model is then
            unchanged.
    """
    depths = {"layers": layers, "encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    if layers is None and part is None:
        constants = {which: deepnorm_constants(**depths, part=which) for which in ("encoder", "decoder")}
    else:
        constants = {"all": deepnorm_constants(**depths, part=part)}

    def of(path: str) -> DeepNormConstants:
        which = "all" if "all" in constants else _part_of(path)
        if which is None:
            raise ValueError(
                "fusednorm.deepnorm_init: model: expected encoder or decoder in the name of each layer, "
                f"got {path!r}; pass the two one by one, with part"
            )
        return constants[which]

    weights = [
        (
            name,
            [(role, tensor, 1.0 if role in ("q", "k") else of(path).beta) for role, tensor in parts.items()],
        )
        for path, name, parts in _projections(model)
    ]
    if not any(parts for _, parts in weights):
        names = [ending for endings in _ENDINGS.values() for ending in endings]
        raise ValueError(
            f"fusednorm.deepnorm_init: model: found nothing to initialise in {type(model).__name__}; looked "
            "for torch.nn.MultiheadAttention, linear layers in a fusednorm.Residual, linear layers under "
            f"{', '.join(sorted(_FEED_FORWARDS))}, and linear layers named {', '.join(names)}"
        )
    residuals = [(path, m) for path, m in model.named_modules() if isinstance(m, Residual)]
    alphas = [(path, m, of(path).alpha) for path, m in residuals if m.placement == "deep"]

    done: dict[str, str] = {}
    for name, parts in weights:
        for _, tensor, gain in parts:
            nn.init.xavier_normal_(tensor, gain)
        gains = [f"{role}: gain {gain:.6g}" for role, _, gain in parts]
        done[name] = ", ".join(gains) or "left as it is"
    for path, residual, alpha in alphas:
        done[f"{path}.alpha" if path else "alpha"] = f"{alpha:.6g}"
        residual.alpha = alpha
    return done
