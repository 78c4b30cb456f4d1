"""DeepNorm: its constants by depth, and which weights deepnorm_init finds and what it makes of them."""

import pytest
import torch
from torch import Tensor, nn

import fusednorm
from fusednorm import Residual, deepnorm_init
from fusednorm.placement import deepnorm_constants

COLS = 128
BETA = 0.5  # of 2 layers


def test_constants() -> None:
    """Values worked out with 25 digits from the paper's table."""

    def check(expected: tuple[float, float], *args, **kw) -> None:
        assert deepnorm_constants(*args, **kw) == pytest.approx(expected, rel=1e-15, abs=0)

    check((2.0, 0.35355339059327376), 8)
    check((1.4142135623730950, 0.5), 2)
    hundreds = {"encoder_layers": 100, "decoder_layers": 100}  # (N**4 M)**(1/16) = 10**0.625
    check((3.4157416777715162, 0.20630951239256401), **hundreds, part="encoder")
    check((4.1617914502878172, 0.16990442448471225), **hundreds, part="decoder")
    check((1.62, 0.435), encoder_layers=16, decoder_layers=1, part="encoder")  # 16**(4/16) = 2
    check((3.0, 0.23570226039551584), encoder_layers=1, decoder_layers=27, part="decoder")  # 81**(1/4) = 3
    assert Residual(nn.Identity(), nn.Identity(), "deep", layers=8).alpha == 2.0


def _check(weight: Tensor, gain: float) -> None:
    """Xavier-normal: a deviation of gain * sqrt(2 / (fan_in + fan_out)) about 0."""
    expected = gain * (2 / sum(weight.shape)) ** 0.5
    # The deviation of n numbers is off by 1 / sqrt(2 n) of itself, their mean by 1 / sqrt(n): 5 of those.
    n = weight.numel()
    assert weight.std().item() == pytest.approx(expected, rel=5 / (2 * n) ** 0.5)
    assert abs(weight.mean().item()) <= 5 * expected / n**0.5


def test_torchs_layers() -> None:
    """Packed q, k, v: each a matrix of its own, and the gain on v alone."""
    encoder = nn.TransformerEncoderLayer(COLS, 4, 2 * COLS)
    kept = {name: p.clone() for name, p in encoder.named_parameters() if p.dim() == 1}
    done = deepnorm_init(encoder, 2)
    assert done == {
        "self_attn.in_proj_weight": "q: gain 1, k: gain 1, v: gain 0.5",
        "self_attn.out_proj.weight": "output: gain 0.5",
        "linear1.weight": "feed-forward: gain 0.5",
        "linear2.weight": "feed-forward: gain 0.5",
    }
    for part, gain in zip(encoder.self_attn.in_proj_weight.chunk(3), (1, 1, BETA), strict=True):
        _check(part, gain)
    for module in (encoder.self_attn.out_proj, encoder.linear1, encoder.linear2):
        _check(module.weight, BETA)
    assert all(torch.equal(p, kept[name]) for name, p in encoder.named_parameters() if name in kept)

    decoder = nn.TransformerDecoderLayer(COLS, 4, 2 * COLS)
    assert len(deepnorm_init(decoder, 2)) == 6
    _check(decoder.multihead_attn.in_proj_weight[-COLS:], BETA)

    apart = nn.MultiheadAttention(COLS, 4, kdim=2 * COLS, vdim=COLS // 2)
    done = deepnorm_init(apart, 2)
    assert done["v_proj_weight"] == "v: gain 0.5" and done["k_proj_weight"] == "k: gain 1"
    _check(apart.q_proj_weight, 1)
    _check(apart.k_proj_weight, 1)
    _check(apart.v_proj_weight, BETA)


class Conv1D(nn.Module):
    """As Hugging Face's: a linear layer with a weight of ``[in, out]``."""

    def __init__(self, out: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cols, out))


def test_usual_names() -> None:
    def linear(rows: int = COLS, cols: int = COLS) -> nn.Linear:
        return nn.Linear(cols, rows)

    layers = {
        "q_proj": linear(), "k_proj": linear(COLS // 4), "v_proj": linear(COLS // 4), "o_proj": linear(),
        "query": linear(), "key": linear(), "value": linear(), "output": nn.ModuleDict({"dense": linear()}),
        "qkv": linear(3 * COLS), "kv_proj": linear(2 * COLS), "c_attn": Conv1D(3 * COLS, COLS),
        "c_fc": Conv1D(2 * COLS, COLS), "gate_proj": linear(),
        "mlp": nn.Sequential(linear(2 * COLS), nn.ReLU(), linear(COLS, 2 * COLS)),
        "lm_head": linear(), "unfc1": linear(),
        "conv": nn.Conv1d(COLS, COLS, 1), "embedding": nn.Embedding(COLS, COLS),
    }  # fmt: skip
    model = nn.ModuleDict(layers)
    kept = {name: p.clone() for name, p in model.named_parameters()}
    done = deepnorm_init(model, 2)
    ones = {"q_proj", "k_proj", "query", "key"}
    betas = {"v_proj", "o_proj", "value", "output.dense", "c_fc", "gate_proj", "mlp.0", "mlp.2"}
    for name in ones | betas:
        _check(model.get_parameter(f"{name}.weight"), 1 if name in ones else BETA)
        assert done[f"{name}.weight"].endswith("gain 1" if name in ones else "gain 0.5")
    for part, gain in zip(model["qkv"].weight.chunk(3), (1, 1, BETA), strict=True):
        _check(part, gain)
    for part, gain in zip(model["c_attn"].weight.chunk(3, dim=1), (1, 1, BETA), strict=True):
        _check(part, gain)
    for part, gain in zip(model["kv_proj"].weight.chunk(2), (1, BETA), strict=True):
        _check(part, gain)
    left = {"lm_head.weight", "unfc1.weight"}
    assert {name for name, what in done.items() if what == "left as it is"} == left
    for name in [*left, "conv.weight", "embedding.weight", *(n for n in kept if n.endswith("bias"))]:
        assert torch.equal(model.get_parameter(name), kept[name])
    assert len(done) == len(ones | betas) + 3 + len(left)


def _deep(sublayer: nn.Module) -> Residual:
    return Residual(sublayer, fusednorm.LayerNorm(COLS), "deep", alpha=7.0)


def test_residuals() -> None:
    """Alpha is set, and any linear layer of a sublayer is found, by its name or as a feed-forward."""
    attention = nn.ModuleDict({"qkv": nn.Linear(COLS, 3 * COLS), "merge": nn.Linear(COLS, COLS)})
    blocks = [_deep(attention), _deep(nn.Sequential(nn.Linear(COLS, COLS))), _deep(nn.Linear(COLS, COLS))]
    model = nn.Sequential(*blocks, nn.Linear(COLS, COLS))
    assert deepnorm_init(model, 8) == {
        "0.sublayer.qkv.weight": "q: gain 1, k: gain 1, v: gain 0.353553",
        "0.sublayer.merge.weight": "feed-forward: gain 0.353553",
        "1.sublayer.0.weight": "feed-forward: gain 0.353553",
        "2.sublayer.weight": "feed-forward: gain 0.353553",
        "3.weight": "left as it is",
        "0.alpha": "2", "1.alpha": "2", "2.alpha": "2",
    }  # fmt: skip
    assert [block.alpha for block in blocks] == [2.0] * 3
    _check(blocks[0].sublayer["merge"].weight, 8**-0.5)
    alone = _deep(nn.Linear(COLS, COLS))
    assert deepnorm_init(alone, 8) == {"sublayer.weight": "feed-forward: gain 0.353553", "alpha": "2"}
    post = Residual(nn.Linear(COLS, COLS), fusednorm.LayerNorm(COLS), "post")
    deepnorm_init(post, 8)
    assert post.alpha == 1.0


def test_encoder_and_decoder() -> None:
    depths = {"encoder_layers": 16, "decoder_layers": 1}
    encoder, decoder = (deepnorm_constants(**depths, part=part) for part in ("encoder", "decoder"))
    model = nn.Transformer(COLS, 4, 1, 1, COLS, batch_first=True)
    done = deepnorm_init(model, **depths)
    assert len(done) == 4 + 6
    _check(model.encoder.layers[0].linear1.weight, encoder.beta)
    _check(model.decoder.layers[0].linear1.weight, decoder.beta)
    _check(model.decoder.layers[0].multihead_attn.in_proj_weight[-COLS:], decoder.beta)

    crossed = nn.ModuleDict({"encoder_attn": nn.MultiheadAttention(COLS, 4)})
    model = nn.ModuleDict({"text_encoder": _deep(nn.Linear(COLS, COLS)), "decoder": crossed})
    done = deepnorm_init(model, **depths)
    assert model["text_encoder"].alpha == encoder.alpha and done["text_encoder.alpha"] == "1.62"
    assert done["decoder.encoder_attn.out_proj.weight"] == f"output: gain {decoder.beta:.6g}"

    block = _deep(nn.Linear(COLS, COLS))
    with pytest.raises(
        ValueError, match="expected encoder or decoder in the name of each layer, got 'sublayer'"
    ):
        deepnorm_init(block, **depths)
    deepnorm_init(block, **depths, part="decoder")
    assert block.alpha == decoder.alpha


@pytest.mark.parametrize(
    ("depths", "message"),
    [
        ({}, "expected layers, or encoder_layers and decoder_layers, got neither"),
        ({"encoder_layers": 2}, "expected layers, .* got encoder_layers$"),
        ({"layers": 2, "decoder_layers": 2}, "expected layers, .* got layers, decoder_layers"),
        ({"layers": 0}, "layers: expected an integer of 1 or more, got 0"),
        ({"layers": 2.0}, "layers: expected an integer of 1 or more, got 2.0"),
        ({"layers": 2, "part": "decoder"}, "part: expected none beside layers, got 'decoder'"),
        ({"layers": True}, "layers: expected an integer of 1 or more, got True"),
        ({"encoder_layers": 2, "decoder_layers": -1}, "decoder_layers: expected an integer .* got -1"),
        ({"encoder_layers": 2, "decoder_layers": 1, "part": "all"}, 'part: .* "decoder", got \'all'),
    ],
)  # fmt: skip
def test_bad_depths(depths: dict, message: str) -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(8, 8)})
    kept = model["fc1"].weight.clone()
    with pytest.raises(ValueError, match=message):
        deepnorm_init(model, **depths)
    assert torch.equal(model["fc1"].weight, kept)


def test_bad_models() -> None:
    """Refused, with the model as it was."""
    ffn, grouped = nn.ModuleDict({"fc1": nn.Linear(8, 8)}), nn.ModuleDict({"qkv": nn.Linear(8, 16)})
    nothing = (
        "found nothing to initialise in Linear; looked for .*MultiheadAttention.*Residual.*mlp.*q_proj.*fc1"
    )
    for model, message in (
        (nn.Linear(8, 8), nothing),
        (nn.ModuleList([ffn, grouped]), r"1.qkv.weight: expected q, k, v .* got shape \[16, 8\]"),
    ):
        kept = [p.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=message):
            deepnorm_init(model, 2)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
