"""NormWarmup: the formulas, the schedule, saving and going on, and that nothing stays behind."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusednorm
import reference
from conftest import NormUnderTest
from fusednorm import NormWarmup, Residual, ResidualStack
from reference import ulps

COLS = 24


def _norm(norm: NormUnderTest, dtype: torch.dtype | None = None, **kw) -> nn.Module:
    module = norm.module(COLS, eps=norm.eps, dtype=dtype, **kw)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.25 * torch.randn_like(p))
    return module


def _formula(norm: NormUnderTest, module: nn.Module, **kw) -> Callable[[Tensor], Tensor]:
    return lambda x: norm.reference(x, module.weight, getattr(module, "bias", None), **kw)


def _step(warmup: NormWarmup, count: int) -> None:
    for _ in range(count):
        warmup.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("taken", range(6))
def test_lambda(norm: NormUnderTest, dtype: torch.dtype, taken: int) -> None:
    module = _norm(norm, dtype)
    warmup = NormWarmup(module, steps=5)
    _step(warmup, taken)
    assert warmup.progress == taken / 5
    # Where the input is large beside its norm: that a swap of the two is seen.
    x = (8 * torch.randn(6, COLS, dtype=torch.float64)).to(dtype).requires_grad_()
    g = torch.randn(6, COLS, dtype=torch.float64).to(dtype)
    y = module(x)
    wide, wide_x = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    expected = reference.warm_norm(wide_x, taken / 5, _formula(norm, wide, eps=norm.eps))
    # The norm's own 4 (8 in fp64, as the reference); in 16 bits half an ulp of its store and the blend's.
    assert y.dtype == dtype and ulps(y, expected) <= (8 if dtype == torch.float64 else 4)
    grads = torch.autograd.grad(y, [x, *module.parameters()], g)
    wants = torch.autograd.grad(expected, [wide_x, *wide.parameters()], g.double())
    for grad, want in zip(grads, wants, strict=True):
        assert (
            grad.dtype == dtype and ulps(grad.flatten(), want.flatten()) <= 8
        )  # sums of 6 rows, or of 24 columns
    if taken == 0:
        assert torch.equal(y, x) and all(not grad.any() for grad in grads[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lambda_is_not_rounded_to_16_bits(norm: NormUnderTest, dtype: torch.dtype) -> None:
    """A lambda of 0.3 in bf16 is 0.30078125, which would move one element in ten."""
    module = _norm(norm, dtype)
    x = torch.randn(200, COLS, dtype=torch.float64).to(dtype)
    stored = module(x)
    _step(NormWarmup(module, steps=10), 3)
    expected = (0.3 * stored.double() + 0.7 * x.double()).to(dtype)
    # Formed in fp32, one in 2**13 (bf16) or 2**10 (fp16) may fall to the other side of a rounding.
    assert (module(x) != expected).double().mean() <= 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken", range(5))
def test_eps(norm: NormUnderTest, dtype: torch.dtype, taken: int) -> None:
    module = _norm(norm, dtype)
    warmup = NormWarmup(module, steps=4, mode="eps", start_eps=2.0)
    _step(warmup, taken)
    x = torch.randn(6, COLS, dtype=torch.float64).to(dtype)
    eps = 2.0 + (norm.eps - 2.0) * taken / 4
    assert ulps(module(x), _formula(norm, module, eps=eps)(x)) <= (8 if dtype == torch.float64 else 4)
    assert module.eps == norm.eps  # outside the call
    with pytest.raises(RuntimeError):
        module(x[:, 1:])
    assert module.eps == norm.eps


def test_default_eps() -> None:
    """RMSNorm's None is the machine epsilon, and comes back; the default start is 1."""
    module = fusednorm.RMSNorm(4)
    warmup = NormWarmup(module, steps=2, mode="eps")
    x = torch.randn(3, 4)
    for eps in (1.0, 0.5 + 2.0**-24, None):
        assert ulps(module(x), reference.rms_norm(x, eps=eps)) <= 4
        assert module.eps is None
        warmup.step()


class AddNorm(fusednorm.LayerNorm):
    """As AddLayerNorm: what it normalizes is its second output."""

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        stream = input + residual
        return super().forward(stream), stream


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(6), (3, 6)),
        (nn.RMSNorm(6), (3, 6)),
        (nn.GroupNorm(2, 6), (3, 6, 5)),
        (nn.BatchNorm1d(6), (5, 6)),
        (nn.BatchNorm2d(6), (2, 6, 3, 3)),
        (nn.InstanceNorm2d(6, affine=True), (2, 6, 3, 3)),
        (nn.LayerNorm(6, elementwise_affine=False), (3, 6)),
        (fusednorm.RMSNorm(6, elementwise_affine=False), (3, 6)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_norms(module: nn.Module, shape: tuple[int, ...]) -> None:
    x, plain = torch.randn(shape), copy.deepcopy(module)
    warmup = NormWarmup(nn.ModuleDict({"norm": module}), steps=4)
    warmup.step()
    torch.testing.assert_close(module(x), 0.25 * plain(x) + 0.75 * x)


def test_input_by_keyword() -> None:
    module = fusednorm.LayerNorm(COLS)
    _step(NormWarmup(module, steps=4), 1)
    x = torch.randn(3, COLS)
    assert torch.equal(module(input=x), module(x)) and not torch.equal(
        module(x), fusednorm.LayerNorm(COLS)(x)
    )


def test_two_outputs() -> None:
    module = AddNorm(COLS)
    warmup = NormWarmup(module, steps=4)
    warmup.step()
    x, residual = torch.randn(2, 3, COLS)
    y, stream = module(x, residual)
    assert torch.equal(stream, x + residual)
    assert ulps(y, reference.warm_norm(stream, 0.25, reference.layer_norm)) <= 4


def test_memory_format_and_input_are_kept() -> None:
    module = nn.GroupNorm(2, 6)
    NormWarmup(module, steps=4)
    x = torch.randn(2, 6, 3, 3).to(memory_format=torch.channels_last)
    kept = x.clone()
    assert module(x).is_contiguous(memory_format=torch.channels_last) and torch.equal(x, kept)


def _model(norm: NormUnderTest) -> nn.Sequential:
    blocks = [
        Residual(nn.Sequential(nn.Linear(COLS, COLS), nn.Tanh()), _norm(norm), placement)
        for placement in ("pre", "post", "sandwich")
    ]
    return nn.Sequential(ResidualStack(blocks), nn.Linear(COLS, 1))


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("mode", ["lambda", "eps"])
def test_nothing_stays_behind(norm: NormUnderTest, mode: str) -> None:
    model, x = _model(norm), torch.randn(3, COLS)
    expected, text, keys = model(x), repr(model), list(model.state_dict())
    warmup = NormWarmup(model, steps=3, mode=mode)
    for taken in range(3):
        assert not warmup.finished and warmup.progress == taken / 3
        assert not torch.allclose(model(x), expected)
        assert repr(model) == text and list(model.state_dict()) == keys and _hooks(model) > 0
        warmup.step()
    assert warmup.finished and warmup.progress == 1.0 and _hooks(model) == 0
    assert torch.equal(model(x), expected)
    warmup.step()
    assert warmup.current_step == 3


@pytest.mark.parametrize("mode", ["lambda", "eps"])
def test_no_steps(norm: NormUnderTest, mode: str) -> None:
    model, x = _model(norm), torch.randn(3, COLS)
    expected = model(x)
    warmup = NormWarmup(model, steps=0, mode=mode)
    assert warmup.finished and warmup.progress == 1.0 and _hooks(model) == 0
    warmup.step()
    assert torch.equal(model(x), expected) and warmup.current_step == 0


@pytest.mark.parametrize("mode", ["lambda", "eps"])
def test_saved_and_restored(norm: NormUnderTest, mode: str) -> None:
    """Training goes on from a checkpoint with the same bits, from before, within and after the warm-up."""

    def start(steps: int, start_eps: float) -> tuple:
        torch.manual_seed(1)
        model, kw = _model(norm), {"start_eps": start_eps} if mode == "eps" else {}
        return model, torch.optim.SGD(model.parameters(), 0.05), NormWarmup(model, steps, mode, **kw)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, warmup: NormWarmup, steps: range) -> list:
        losses = []
        for step in steps:
            x = torch.randn(8, COLS, generator=torch.Generator(x_device).manual_seed(step))
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()
            losses.append(loss.item())
        return losses

    x_device = torch.empty(0).device
    whole = train(*start(6, 2.0), range(9))
    for at in (0, 2, 5, 6, 8):
        first = start(6, 2.0)
        losses = train(*first, range(at))
        saved = pickle.loads(pickle.dumps([part.state_dict() for part in first]))
        second = start(1000, 3.0)
        for part, state in zip(second, saved, strict=True):
            part.load_state_dict(state)
        assert second[2].state_dict() == first[2].state_dict() and second[2].steps == 6
        assert losses + train(*second, range(at, 9)) == whole, at
        assert _hooks(second[0]) == 0
    second[2].load_state_dict(start(6, 2.0)[2].state_dict())  # and back to the beginning
    assert second[2].progress == 0.0 and _hooks(second[0]) > 0


@pytest.mark.parametrize("mode", ["lambda", "eps"])
def test_copies_of_the_model(norm: NormUnderTest, mode: str) -> None:
    """Averaged weights are a copy made early: it follows to the end. A pickle stays where it was."""
    model, x = _model(norm), torch.randn(3, COLS)
    expected = model(x)
    warmup = NormWarmup(model, steps=4, mode=mode)
    average = torch.optim.swa_utils.AveragedModel(model)
    warmup.step()
    stored = pickle.loads(pickle.dumps(model))
    at_one = model(x)
    for _ in range(3):
        assert torch.equal(average(x), model(x))
        warmup.step()
    assert torch.equal(average(x), expected) and torch.equal(stored(x), at_one)
    norms = [m for m in average.modules() if isinstance(m, norm.module)]
    assert norms and not any("Lerp" in m(x.requires_grad_()).grad_fn.name() for m in norms)
    assert all(m.eps == norm.eps for m in norms)
    NormWarmup(average, steps=4)  # its hooks are finished, so that another can begin
    assert not torch.allclose(average(x), expected)


@pytest.mark.parametrize("placement", ["pre", "post", "deep", "sandwich"])
def test_fused_blocks_take_part(norm: NormUnderTest, placement: str) -> None:
    """A fused operator would pass the warm-up over."""
    block = Residual(nn.Identity(), _norm(norm), placement, 2.0 if placement == "deep" else None)
    stack, x = ResidualStack([block], _norm(norm)), torch.randn(3, COLS)
    _step(NormWarmup(stack, steps=4), 1)

    def warm(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda h: reference.warm_norm(h, 0.25, _formula(norm, module, eps=norm.eps))

    norm2 = warm(block.norm2) if placement == "sandwich" else None
    expected = reference.residual(x, lambda h: h, placement, warm(block.norm), norm2, block.alpha)
    assert ulps(stack(x), warm(stack.final_norm)(expected)) <= 8  # two to three norms of 4 or less


def test_torchs_inference_path_takes_part() -> None:
    """nn.TransformerEncoderLayer's fused path for evaluation reads the norms' weights and calls no norm."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    warmup = NormWarmup(layer, steps=2)
    warmup.step()
    trained = layer(x)
    with torch.no_grad():
        evaluated = layer.eval()(x)
    torch.testing.assert_close(evaluated, trained)


def test_checkpointing(norm: NormUnderTest) -> None:
    model, x = _model(norm), torch.randn(3, COLS, requires_grad=True)
    _step(NormWarmup(model, steps=4), 1)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    recomputed = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), x)[0], expected)


def test_compiled(norm: NormUnderTest) -> None:
    """One graph for the whole warm-up, and one after it, also for a model that was compiled before."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _) -> Callable:
        graphs.append(graph)
        return graph

    model, x = _model(norm), torch.randn(3, COLS)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = compiled(x)
    warmup = NormWarmup(model, steps=12)
    graphs.clear()
    for _ in range(12):
        y = compiled(x)
        assert torch.equal(y, model(x)) and not torch.allclose(y, expected)
        warmup.step()
    assert len(graphs) == 1
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert len(graphs) == 2 and "lerp" not in graphs[1].code and "lerp" in graphs[0].code
    warmup.load_state_dict({**warmup.state_dict(), "current_step": 6})
    assert not torch.allclose(compiled(x), expected)


def test_compiled_backward(norm: NormUnderTest) -> None:
    model, x = _model(norm), torch.randn(3, COLS, requires_grad=True)
    _step(NormWarmup(model, steps=4), 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    assert ulps(grad.flatten(), want.flatten()) <= 2  # the gradients of x's branches, summed in any order


def test_compiled_eps(norm: NormUnderTest) -> None:
    """Each eps is a graph of its own; right all the same."""
    model, x = _model(norm), torch.randn(3, COLS)
    warmup = NormWarmup(model, steps=3, mode="eps")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(4):
        assert torch.equal(compiled(x), model(x))
        warmup.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps: expected an integer of 0 or more, got -1"),
        ({"steps": 2.5}, "steps: expected an integer of 0 or more, got 2.5"),
        ({"steps": True}, "steps: expected an integer of 0 or more, got True"),
        ({"mode": "linear"}, 'mode: expected "lambda" or "eps", got \'linear\''),
        ({"start_eps": 1.0}, 'start_eps: expected with mode "eps" only, got mode "lambda"'),
        ({"mode": "eps", "start_eps": 1e-5}, "a finite number above the eps of norm '1', 1e-05, got 1e-05"),
        ({"mode": "eps", "start_eps": float("nan")}, "start_eps: expected a finite number .* got nan"),
        ({"mode": "eps", "start_eps": float("inf")}, "start_eps: expected a finite number .* got inf"),
        ({"model": nn.Linear(4, 4)}, "model: expected one with norms .* got Linear without any"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), fusednorm.LayerNorm(4))
    with pytest.raises(ValueError, match=f"^fusednorm.NormWarmup: .*{message}"):
        NormWarmup(**{"model": model, **arguments})
    assert _hooks(model) == 0


def test_one_warm_up_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), fusednorm.LayerNorm(4))
    warmup = NormWarmup(model, steps=1)
    with pytest.raises(ValueError, match="expected norms that are not warmed up yet, got '1'"):
        NormWarmup(model, mode="eps")
    warmup.step()
    NormWarmup(model, mode="eps")


def test_bad_states() -> None:
    warmup = NormWarmup(fusednorm.LayerNorm(4), mode="lambda")
    warmup.step()
    other = NormWarmup(fusednorm.LayerNorm(4), mode="eps").state_dict()
    with pytest.raises(ValueError, match="state_dict: expected that of mode 'lambda', got mode 'eps'"):
        warmup.load_state_dict(other)
    with pytest.raises(
        ValueError, match="expected that of mode 'lambda', got one without steps, current_step"
    ):
        warmup.load_state_dict({"mode": "lambda", "start_eps": 1.0})
    assert warmup.current_step == 1 and warmup.steps == 1000
