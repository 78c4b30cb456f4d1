"""Residual and ResidualStack: the formulas, the errors, fusion and where it steps aside."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import fusednorm
import reference
from conftest import NormUnderTest
from fusednorm import Residual, ResidualStack, functional
from reference import DTYPES, ulps

PLACEMENTS = ("pre", "post", "deep", "sandwich")
COLS = 24


class FeedForward(nn.Module):
    """A sublayer that takes a further argument, as attention takes its mask."""

    def __init__(self, cols: int = COLS, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(cols, 2 * cols, dtype=dtype)
        self.fc2 = nn.Linear(2 * cols, cols, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc2(torch.tanh(self.fc1(x)))
        return y if mask is None else y * mask


def _block(norm: NormUnderTest, placement: str, dtype: torch.dtype | None = None, **kw) -> Residual:
    """A block whose gains are none of them 1; alpha * x is exact, so that two steps round as one does."""
    alpha = 2.0 if placement == "deep" else None
    block = Residual(FeedForward(dtype=dtype), norm.module(COLS, eps=norm.eps, **kw), placement, alpha)
    if dtype:
        block.to(dtype)
    with torch.no_grad():
        for module in block.modules():
            if isinstance(module, norm.torch_module):
                for p in module.parameters():
                    p.add_(0.25 * torch.randn_like(p))
    return block


def _blocks(norm: NormUnderTest, placement: str, count: int = 3, dtype: torch.dtype | None = None) -> list:
    return [_block(norm, placement, dtype) for _ in range(count)]


def _formula(norm: NormUnderTest, block: Residual, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """``block`` (a float64 copy) by the float64 formulas."""

    def of(module: nn.Module):
        return lambda h: norm.reference(h, module.weight, getattr(module, "bias", None), eps=norm.eps)

    def feed_forward(h: Tensor) -> Tensor:
        f = block.sublayer
        y = torch.tanh(h @ f.fc1.weight.t() + f.fc1.bias) @ f.fc2.weight.t() + f.fc2.bias
        return y if mask is None else y * mask

    norm2 = of(block.norm2) if block.placement == "sandwich" else None
    return reference.residual(x, feed_forward, block.placement, of(block.norm), norm2, block.alpha)


def _gradients(output: Tensor, module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, [x, *module.parameters()], g.to(output.dtype)))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fused operators called, in order."""
    calls: list[str] = []

    def counting(name: str):
        function = getattr(functional, name)

        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(functional, name, call)

    counting("add_layer_norm")
    counting("add_rms_norm")
    return calls


# In ulps of the largest value. Measured: 4.0 at most, forward and backward, in fp64 and fp32 (sums of 24 and
# 48 products, and those of the reference in fp64) as in bf16 (half an ulp at each of five roundings: norm,
# two products, tanh, sum). Twice that is room for the matrix products of other machines.
ULPS = 8.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_formula(norm: NormUnderTest, placement: str, dtype: torch.dtype) -> None:
    block = _block(norm, placement, dtype)
    if placement == "deep":
        block.alpha = 1.7
    x, g = torch.randn(2, 3, 5, COLS, dtype=dtype)
    mask = torch.rand(3, 5, 1).round().to(dtype)
    x.requires_grad_()
    y = block(x, mask=mask)
    wide, wide_x = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
    expected = _formula(norm, wide, wide_x, mask)
    assert y.dtype == dtype and ulps(y, expected) <= ULPS
    wants = _gradients(expected, wide, wide_x, g)
    for grad, want in zip(_gradients(y, block, x, g), wants, strict=True):
        assert grad.dtype == dtype and ulps(grad.flatten(), want.flatten()) <= ULPS


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_roundings(norm: NormUnderTest, placement: str, stream: torch.dtype) -> None:
    """bf16 sublayers, bit for bit: the sum is rounded once, to the stream's dtype, then normalized."""
    block = _block(norm, placement, torch.bfloat16)
    block.sublayer_dtype = torch.bfloat16
    x = torch.randn(7, COLS, dtype=stream)
    with torch.no_grad():
        h = block.norm(x).bfloat16() if placement in ("pre", "sandwich") else x.bfloat16()
        branch = block.sublayer(h)
        branch = block.norm2(branch) if placement == "sandwich" else branch
        # fp64 holds the sum, but for bits far below the rounding that follows.
        expected = (block.alpha * x.double() + branch.double()).to(stream)
        expected = block.norm(expected) if placement in ("post", "deep") else expected
        y = block(x)
    assert y.dtype == stream and torch.equal(y, expected)


@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_pair_of_dtypes(norm: NormUnderTest, placement: str, stream: torch.dtype) -> None:
    """The stream keeps its dtype under sublayers of any; fused or not, the stack has the plain one's bits."""
    for dtype in DTYPES:
        blocks = _blocks(norm, placement, dtype=dtype)
        for block in blocks:
            block.sublayer_dtype = dtype
            block.norm.to(stream)
        final, x = norm.module(COLS, dtype=stream), torch.randn(50, COLS, dtype=stream)
        stack, plain = ResidualStack(blocks, final), nn.Sequential(*blocks, final)
        assert blocks[0](x).dtype == stream and ResidualStack(blocks)(x).dtype == stream
        y = stack(x)
        assert y.dtype == stream and torch.equal(y, plain(x)), dtype


def test_an_fp64_stream_under_16_bits(norm: NormUnderTest) -> None:
    """torch takes fp64 to 16 bits by way of fp32: one value in some 20,000 differs from rounding once."""
    blocks = [Residual(nn.Identity(), norm.module(1024, dtype=torch.float64)) for _ in range(2)]
    for block in blocks:
        block.sublayer_dtype = torch.float16
        nn.init.normal_(block.norm.weight)  # with 1 all values would be near those of fp16
    x = torch.randn(500, 1024, dtype=torch.float64)
    assert torch.equal(ResidualStack(blocks)(x), nn.Sequential(*blocks)(x))


def test_post_norm_is_one_operator(norm: NormUnderTest, fused_calls: list[str]) -> None:
    x = torch.randn(3, COLS)
    for placement, calls in {"pre": 0, "sandwich": 0, "post": 1, "deep": 1}.items():
        fused_calls.clear()
        _block(norm, placement)(x)
        assert fused_calls == [f"add_{norm.name}"] * calls


def test_options_of_the_norm_reach_the_fused_operator(norm: NormUnderTest, fused_calls: list[str]) -> None:
    options = [{"weight_offset": 1.0}, {"input_scale": 0.25}, {"input_scale": 0.25, "weight_offset": 0.5}]
    if norm.has_bias:
        options += [{"unbiased": True}, {"eps_outside": True, "input_scale": 0.25}, {"bias": False}]
    else:
        options += [{"casting_mode": "llama"}]
    for kw in [*options, {"elementwise_affine": False}]:
        block = Residual(FeedForward(), norm.module(COLS, eps=0.1, **kw), "post")
        x = torch.randn(3, COLS)
        assert torch.equal(block(x), block.norm(x + block.sublayer(x))), kw
    assert len(fused_calls) == len(options) + 1


def test_default_eps_is_that_of_the_stream(fused_calls: list[str]) -> None:
    """eps None beside an input scale: the machine epsilon of the sum's dtype, not of the branch's."""
    for dtype in (torch.float64, torch.float32):
        norm = fusednorm.RMSNorm(COLS, input_scale=2.0**-10, dtype=dtype)
        x = torch.full((2, COLS), 2.0**-12, dtype=dtype)
        block = Residual(nn.Identity(), norm, "post")
        assert ulps(block(x), reference.rms_norm(2 * 2.0**-10 * x)) <= 4  # as RMSNorm's own
    assert len(fused_calls) == 2


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_norms_are_called(norm: NormUnderTest, placement: str, fused_calls: list[str]) -> None:
    class Halved(norm.module):  # type: ignore[name-defined, misc]
        def forward(self, input: Tensor) -> Tensor:
            return 0.5 * super().forward(input)

    for other in (norm.torch_module(COLS), Halved(COLS), nn.GroupNorm(4, COLS), nn.Identity()):
        block = Residual(FeedForward(), other, placement, 2.0 if placement == "deep" else None)
        x = torch.randn(3, COLS)
        if placement in ("pre", "sandwich"):
            branch = block.sublayer(other(x))
            expected = x + (block.norm2(branch) if placement == "sandwich" else branch)
        else:
            expected = other(block.alpha * x + block.sublayer(x))
        assert torch.equal(block(x), expected)
    assert not fused_calls


def test_sandwich_norms() -> None:
    norm = fusednorm.RMSNorm(COLS)
    with torch.no_grad():
        norm.weight.fill_(3.0)
    block = Residual(FeedForward(), norm, "sandwich")
    assert block.norm is norm and block.norm2 is not norm
    assert torch.equal(block.norm2.weight, norm.weight) and block.norm2.weight is not norm.weight
    pair = fusednorm.RMSNorm(COLS), fusednorm.LayerNorm(COLS)
    block = Residual(FeedForward(), pair, "sandwich")
    assert (block.norm, block.norm2) == pair


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_zero_rows_and_frozen_parameters(norm: NormUnderTest, placement: str) -> None:
    block = _block(norm, placement)
    x = torch.randn(0, COLS, requires_grad=True)
    block(x).sum().backward()
    assert x.grad.shape == (0, COLS) and torch.equal(block.norm.weight.grad, torch.zeros(COLS))
    block.requires_grad_(False)
    assert not block(torch.randn(2, COLS)).requires_grad
    x, stack = torch.randn(2, COLS, requires_grad=True), ResidualStack([block, block], norm.module(COLS))
    kept = x.detach().clone()
    stack(x).sum().backward()
    assert x.grad is not None and block.norm.weight.grad.abs().sum() == 0 and torch.equal(x, kept)


def _copies(module: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_copies(norm: NormUnderTest, placement: str) -> None:
    stack = ResidualStack(_blocks(norm, placement, 2), norm.module(COLS))
    x = torch.randn(3, COLS)
    for module in (stack[0], stack):
        for twin in _copies(module):
            assert repr(twin) == repr(module) and torch.equal(twin(x), module(x))
            assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in module.parameters()}


def test_repr() -> None:
    block = Residual(nn.Identity(), nn.Identity(), "deep", layers=8, sublayer_dtype=torch.bfloat16)
    assert block.extra_repr() == "placement='deep', alpha=2, sublayer_dtype=torch.bfloat16"
    assert Residual(nn.Identity(), nn.Identity()).extra_repr() == "placement='pre'"


# --- the stack ---

# Blocks of 3 and a final norm: how many of their norms have a sum before them that is fused.
FUSED = {"pre": 3, "sandwich": 3, "post": 3, "deep": 3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stack_gives_the_numbers_of_the_plain_one(
    norm: NormUnderTest, placement: str, dtype: torch.dtype, fused_calls: list[str]
) -> None:
    """Outputs bit for bit: the sum is rounded once and normalized as stored, in one operator or in two."""
    blocks, final = _blocks(norm, placement, dtype=dtype), norm.module(COLS, dtype=dtype)
    plain, stack = nn.Sequential(*blocks, final), ResidualStack(blocks, final)
    x, g = torch.randn(2, 4, COLS, dtype=dtype)
    x.requires_grad_()
    expected = plain(x)
    fused_calls.clear()
    y = stack(x)
    assert torch.equal(y, expected)
    assert fused_calls == [f"add_{norm.name}"] * FUSED[placement]
    # The gradient of a sum is rounded once here, and twice in the plain stack: an ulp a block.
    pairs = zip(_gradients(y, stack, x, g), _gradients(expected, plain, x, g), strict=True)
    for grad, want in pairs:
        assert ulps(grad.flatten(), want.flatten()) <= 3


def test_stack_against_the_formula(norm: NormUnderTest) -> None:
    """All placements in one stack, so that every kind of block follows every other."""
    pairs = [pair for first in PLACEMENTS for second in PLACEMENTS for pair in (first, second)]
    blocks = [_block(norm, placement) for placement in pairs]
    stack, x = ResidualStack(blocks), torch.randn(4, COLS)
    expected = x.double()
    for block in blocks:
        expected = _formula(norm, copy.deepcopy(block).double(), expected)
    # Of 32 blocks; each carries on the errors of those before it, which add up like a random walk: sqrt(32).
    assert ulps(stack(x), expected) <= 5.7 * ULPS
    assert torch.equal(stack(x), nn.Sequential(*blocks)(x))


def test_stack_state(norm: NormUnderTest) -> None:
    blocks = _blocks(norm, "sandwich")
    final = norm.module(COLS)
    stack, plain = ResidualStack(blocks, final), nn.Sequential(*blocks, final)
    assert list(stack.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(stack.state_dict(), strict=True)
    stack.load_state_dict(plain.state_dict(), strict=True)
    assert len(stack) == 3 and list(stack) == blocks and stack[-1] is blocks[2] and stack.final_norm is final
    assert ResidualStack(blocks).final_norm is None
    with pytest.raises(IndexError):
        stack[3]


def test_stack_passes_arguments_on(norm: NormUnderTest) -> None:
    stack = ResidualStack(_blocks(norm, "pre"))
    x, mask = torch.randn(4, COLS), torch.zeros(4, 1)
    assert torch.equal(stack(x, mask), x) and torch.equal(stack(x, mask=mask), x)


def test_fp32_stream_under_bf16_sublayers(norm: NormUnderTest, fused_calls: list[str]) -> None:
    """Steps of 2**-10 are lost on a bf16 stream at 1 and kept on an fp32 one; both are fused."""

    class Step(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.bfloat16
            return torch.full_like(x, 2.0**-10)

    blocks = [Residual(Step(), norm.module(4), sublayer_dtype=torch.bfloat16) for _ in range(8)]
    stack, x = ResidualStack(blocks), torch.ones(2, 4)
    y = stack(x)
    assert y.dtype == torch.float32 and y.unique().tolist() == [1 + 8 * 2.0**-10]
    assert fused_calls == [f"add_{norm.name}"] * 7
    assert stack(x.bfloat16()).unique().tolist() == [1.0]
    blocks = [_block(norm, "pre", torch.bfloat16) for _ in range(3)]
    for block in blocks:
        block.sublayer_dtype = torch.bfloat16
    x = torch.randn(5, COLS)
    assert torch.equal(ResidualStack(blocks)(x), nn.Sequential(*blocks)(x))


def test_llama_mode_rounds_where_the_plain_stack_does(fused_calls: list[str]) -> None:
    """On an fp32 stream the llama mode rounds x_hat to fp32; the fused operator would to bf16."""

    def block() -> Residual:
        norm = fusednorm.RMSNorm(COLS, casting_mode="llama")
        nn.init.normal_(norm.weight)
        return Residual(FeedForward(dtype=torch.bfloat16), norm, sublayer_dtype=torch.bfloat16)

    blocks, x = [block() for _ in range(3)], torch.randn(50, COLS)
    assert torch.equal(ResidualStack(blocks)(x), nn.Sequential(*blocks)(x)) and not fused_calls
    x = x.bfloat16()
    assert torch.equal(ResidualStack(blocks)(x), nn.Sequential(*blocks)(x)) and len(fused_calls) == 2


def test_autocast(norm: NormUnderTest) -> None:
    """Under autocast the stream keeps its fp32; sublayer_dtype changes no number, as F casts anyway."""
    blocks, x = _blocks(norm, "pre"), torch.randn(4, COLS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ResidualStack(blocks)(x)
        for block in blocks:
            block.sublayer_dtype = torch.bfloat16
        assert y.dtype == torch.float32 and torch.equal(ResidualStack(blocks)(x), y)
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and all(
        p.grad.dtype == torch.float32 for p in blocks[0].parameters()
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hooks_are_not_passed_over(norm: NormUnderTest, placement: str, fused_calls: list[str]) -> None:
    stack, x = ResidualStack(_blocks(norm, placement), norm.module(COLS)), torch.randn(4, COLS)
    expected, seen = stack(x), []
    kinds = [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook]
    kinds += [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook]
    for module in (stack[1], stack[1].norm, stack.final_norm):
        for register in kinds:
            handle = register(module, lambda module, *_: seen.append(module) and None)
            seen.clear()
            y = stack(x.clone().requires_grad_())
            y.sum().backward()
            assert seen == [module] and torch.equal(y, expected)
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    fused_calls.clear()
    assert torch.equal(stack(x), expected) and {stack[0].norm, stack[1], stack.final_norm} <= set(seen)
    assert not fused_calls
    handle.remove()
    stack(x)
    assert len(fused_calls) == FUSED[placement]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_wrapped_blocks(norm: NormUnderTest, placement: str) -> None:
    """What replaces a block (checkpointing, sharding), or compiles it, is called."""

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    stack, x = ResidualStack(_blocks(norm, placement)), torch.randn(4, COLS, requires_grad=True)
    expected, g = stack(x), torch.randn(4, COLS)
    wants = _gradients(expected, stack, x, g)
    stack.add_module("1", Checkpointed(stack[1]))
    y = stack(x)
    assert torch.equal(y, expected) and stack[1].calls == 1
    for grad, want in zip(_gradients(y, stack, x, g), wants, strict=True):
        assert ulps(grad.flatten(), want.flatten()) <= 3  # as in the plain stack
    compiled = []
    stack[0].compile(backend=lambda graph, _: compiled.append(graph) or graph, fullgraph=True)
    assert torch.equal(stack(x), expected) and len(compiled) == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_compiled(norm: NormUnderTest, placement: str) -> None:
    stack = ResidualStack(_blocks(norm, placement, 2), norm.module(COLS))
    for module in (stack[0], stack):
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x, g = torch.randn(4, COLS, requires_grad=True), torch.randn(4, COLS)
        y, expected = compiled(x), module(x)
        assert torch.equal(y, expected)
        for grad, want in zip(_gradients(y, module, x, g), _gradients(expected, module, x, g), strict=True):
            assert (
                ulps(grad.flatten(), want.flatten()) <= 2
            )  # the gradients of x's branches, summed in any order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_hundred_layers(norm: NormUnderTest, placement: str, dtype: torch.dtype) -> None:
    """200 sublayers, forward and backward: finite, and rows of unit mean square after the last norm."""
    layers = 100
    deep = {"layers": layers} if placement == "deep" else {}
    blocks = [Residual(FeedForward(16), norm.module(16), placement, **deep) for _ in range(2 * layers)]
    stack = ResidualStack(blocks, norm.module(16)).to(dtype)
    if deep:
        fusednorm.deepnorm_init(stack, layers)
    x = torch.randn(4, 16, dtype=dtype, requires_grad=True)
    y = stack(x)
    # 0.51 ulp of each element, and eps beside a mean square of 1 or more (before it: post-norm's own output).
    rounding = 2 * reference.unit(dtype) + 1e-5
    assert (y.double().square().mean(-1) - 1).abs().max() <= rounding
    y.backward(torch.randn_like(y))
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in stack.parameters())


# --- bad input ---


NORM = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "parallel"}, "placement: expected one of pre, post, deep, sandwich, got 'parallel'"),
        ({"placement": "deep"}, 'placement "deep": expected alpha or layers .* got neither'),
        ({"placement": "deep", "alpha": 2.0, "layers": 8}, "expected alpha or layers .* got both"),
        ({"placement": "deep", "alpha": 0.0}, "alpha: expected a positive number, got 0.0"),
        ({"placement": "deep", "alpha": float("nan")}, "alpha: expected a positive number, got nan"),
        ({"placement": "deep", "alpha": float("inf")}, "alpha: expected a positive number, got inf"),
        ({"placement": "deep", "layers": 0}, "layers: expected an integer of 1 or more, got 0"),
        ({"alpha": 1.0}, 'alpha, layers: expected with placement "deep" only, got placement "pre"'),
        ({"placement": "post", "layers": 8}, 'expected with placement "deep" only, got placement "post"'),
        ({"norm": (NORM, NORM)}, 'norm: expected one norm for placement "pre", got 2'),
        ({"norm": (NORM,) * 3, "placement": "sandwich"}, "norm: expected a norm or a pair .* got 3"),
        ({"norm": ()}, 'norm: expected one norm for placement "pre", got 0'),
        ({"norm": torch.relu}, "norm: expected a torch.nn.Module, got builtin_function"),
        ({"sublayer": torch.relu}, "sublayer: expected a torch.nn.Module, got builtin_function"),
    ],
)
def test_bad_construction(arguments: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^fusednorm.*{message}"):
        Residual(**{"sublayer": nn.Identity(), "norm": NORM, **arguments})


def test_bad_stacks() -> None:
    block = Residual(nn.Identity(), NORM)
    for arguments, message in (
        (([],), "residuals: expected one or more, got none"),
        (([block, nn.Linear(4, 4)],), r"residuals\[1\]: expected a fusednorm.Residual, got Linear"),
        (([block], torch.relu), "final_norm: expected a torch.nn.Module, got builtin_function"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^fusednorm.ResidualStack: {message}"):
            ResidualStack(*arguments)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bad_sublayers(placement: str) -> None:
    """One that would broadcast over the stream is refused as well."""
    norm, alpha = fusednorm.LayerNorm(8), 2.0 if placement == "deep" else None
    for stack in (False, True):
        for sublayer, got in (
            (nn.Linear(8, 1), r"\[3, 1\]"),
            (nn.Linear(8, 9), r"\[3, 9\]"),
            (nn.LSTM(8, 8), "tuple"),
        ):
            module: nn.Module = Residual(sublayer, norm, placement, alpha)
            module = ResidualStack([module]) if stack else module
            expected = (
                f"sublayer: expected a tensor of shape .3, 8. from {type(sublayer).__name__}, got {got}"
            )
            with pytest.raises(RuntimeError, match=expected):
                module(torch.randn(3, 8))
