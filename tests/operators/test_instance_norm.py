"""InstanceNorm: GroupNorm with a group for each channel (test_group_norm.py), and what is its own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional as F

import fusednorm
import reference
from fusednorm.functional import group_norm, instance_norm
from reference import DTYPES, ulps

TORCHS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
SHAPES = {1: (2, 6, 5), 2: (2, 6, 5, 7), 3: (2, 6, 3, 5, 7)}
# As test_values.FORWARD_ULPS.
FORWARD_ULPS = {torch.float64: 8.0, torch.float32: 4.0, torch.bfloat16: 1.0, torch.float16: 1.0}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_grads(dtype: torch.dtype, dims: int) -> None:
    """The float64 formula; the bits of group_norm, whose gradients test_group_norm.py has."""
    x = (0.5 + torch.randn(SHAPES[dims], dtype=torch.float64)).to(dtype).requires_grad_()
    w, b = (torch.randn(6, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    g = torch.randn(x.shape, dtype=torch.float64).to(dtype)
    y = instance_norm(x, weight=w, bias=b)
    assert y.dtype == dtype
    x_hat = instance_norm(x)
    assert ulps(x_hat, reference.group_norm(x, 6), dims) <= FORWARD_ULPS[dtype]
    expected = group_norm(x, 6, w, b)
    assert torch.equal(y, expected)
    grads, wants = (torch.autograd.grad(output, (x, w, b), g) for output in (y, expected))
    assert all(torch.equal(a, e) for a, e in zip(grads, wants, strict=True))


def test_gradcheck() -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (3,), (3,)))
    assert gradcheck(lambda x, w, b: instance_norm(x, None, None, w, b), (x, w, b), check_forward_ad=True)


def test_arguments_in_torchs_order() -> None:
    x, w, b = torch.randn(2, 6, 5), torch.randn(6), torch.randn(6)
    arguments = (x, None, None, w, b, True, 0.3, 1e-2)
    torch.testing.assert_close(instance_norm(*arguments), F.instance_norm(*arguments))


def test_memory_format_is_kept() -> None:
    module = fusednorm.InstanceNorm(6)
    for x, memory_format in (
        (torch.randn(2, 6, 5, 7), torch.channels_last),
        (torch.randn(2, 6, 3, 5, 7), torch.channels_last_3d),
    ):
        y = module(x.contiguous(memory_format=memory_format))
        assert y.is_contiguous(memory_format=memory_format)
        torch.testing.assert_close(y, module(x))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("affine", [False, True])
def test_module_is_torchs(dims: int, affine: bool) -> None:
    """state_dicts both ways, values with and without a batch, a module that became ours by its class."""
    theirs = TORCHS[dims](6, affine=affine)
    for p in theirs.parameters():
        nn.init.normal_(p)
    x = torch.randn(SHAPES[dims])
    for spatial_dims in (None, dims):
        ours = fusednorm.InstanceNorm(6, affine=affine, spatial_dims=spatial_dims)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        torch.testing.assert_close(ours(x), theirs(x))
        assert torch.equal(ours.eval()(x), ours.train()(x))
        if dims == 1 or spatial_dims:
            torch.testing.assert_close(ours(x[0]), theirs(x[0]))
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(twin(x), ours(x)) and repr(twin) == repr(ours)
    assert repr(fusednorm.InstanceNorm(6, affine=affine))[12:] == repr(theirs)[14:]
    assert repr(ours).endswith(f", spatial_dims={dims})")
    theirs.__class__ = fusednorm.InstanceNorm
    assert torch.equal(theirs(x), ours(x))


def test_compile_and_grads() -> None:
    torch.compiler.reset()
    module = fusednorm.InstanceNorm(6, affine=True, spatial_dims=2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for shape in ((2, 6, 5, 7), (6, 5, 7)):
        x = torch.randn(shape, requires_grad=True)
        leaves = [x, module.weight, module.bias]
        got, expected = (torch.autograd.grad(m(x).sin().sum(), leaves) for m in (compiled, module))
        assert all(torch.equal(a, e) for a, e in zip(got, expected, strict=True))


def test_a_single_position() -> None:
    """The error that torch gives, by its type and words; one sample and one channel are no fault."""
    for shape in ((2, 6, 1), (2, 6, 1, 1), (2, 6)):
        for function in (instance_norm, F.instance_norm):
            with pytest.raises(ValueError, match="Expected more than 1 spatial element when training"):
                function(torch.randn(shape))
    for module in (fusednorm.InstanceNorm(6), fusednorm.InstanceNorm(6).eval()):
        with pytest.raises(ValueError, match="more than 1 spatial element"):
            module(torch.randn(2, 6, 1))
    x = torch.randn(1, 1, 5)
    torch.testing.assert_close(instance_norm(x), F.instance_norm(x))
    assert instance_norm(torch.randn(0, 6, 5)).shape == (0, 6, 5)


def test_running_statistics_are_refused() -> None:
    x, statistic = torch.randn(2, 6, 5), torch.zeros(6)
    for kw, message in [
        ({"running_mean": statistic}, "running_mean: expected None, got Tensor"),
        ({"running_var": statistic}, "running_var: expected None, got Tensor"),
        ({"use_input_stats": False}, "use_input_stats: expected True, got False"),
    ]:
        with pytest.raises(ValueError, match="fusednorm::instance_norm: " + message):
            instance_norm(x, **kw)
    with pytest.raises(ValueError, match="fusednorm.InstanceNorm: track_running_stats: expected False"):
        fusednorm.InstanceNorm(6, track_running_stats=True)
    tracking = nn.InstanceNorm1d(6, track_running_stats=True)
    tracking.__class__ = fusednorm.InstanceNorm
    with pytest.raises(ValueError, match="running_mean: expected None"):
        tracking(x)


@pytest.mark.parametrize(
    ("spatial_dims", "shape", "message"),
    [
        (None, (6,), r"input: expected shape \[N, C, \*\].*got \[6\]"),
        (None, (2, 6, 1, 1, 1, 5), r"input: expected shape \[N, C, \*\].*got \[2, 6, 1, 1, 1, 5\]"),
        (None, (6, 5, 7), r"expected 6 channels .*got 5 in dimension 1 .*it needs spatial_dims=2"),
        (
            None,
            (2, 5, 7),
            r"expected 6 channels \(num_features\), got 5 in dimension 1 of shape \[2, 5, 7\]$",
        ),
        (None, (5, 7), r"expected 6 channels \(num_features\), got 5 in dimension 0 of shape \[5, 7\]$"),
        (1, (2, 6, 5, 7), r"input: expected shape .* with 1 \(spatial_dims\).*got \[2, 6, 5, 7\]"),
        (2, (6, 5), r"input: expected shape .* with 2 \(spatial_dims\).*got \[6, 5\]"),
        (2, (5, 6, 7), r"expected 6 channels \(num_features\), got 5 in dimension 0"),
    ],
)
def test_bad_input(spatial_dims: int | None, shape: tuple[int, ...], message: str) -> None:
    module = fusednorm.InstanceNorm(6, spatial_dims=spatial_dims)
    with pytest.raises(ValueError, match="fusednorm.InstanceNorm: .*" + message):
        module(torch.randn(shape))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="spatial_dims: expected 1, 2, 3 or None, got 4"):
        fusednorm.InstanceNorm(6, spatial_dims=4)
    with pytest.raises(RuntimeError, match=r"fusednorm::instance_norm: input: expected shape \[N, C, \*\]"):
        instance_norm(torch.randn(6))
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[6\].*got \[5\]"):
        instance_norm(torch.randn(2, 6, 5), weight=torch.ones(5))
    with pytest.raises(RuntimeError, match=r"eps: expected a finite number"):
        instance_norm(torch.randn(2, 6, 5), eps=float("inf"))
    nested = torch.nested.nested_tensor([torch.ones(6, 5), torch.ones(4, 5)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"fusednorm::instance_norm: input: expected a dense .*nested"):
        instance_norm(nested)
