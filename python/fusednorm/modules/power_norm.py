"""PowerNorm: columns by a running quadratic mean, with the approximate backward that goes with it."""

from typing import Any

import torch
from torch import Tensor, nn

from fusednorm import functional
from fusednorm.modules.columns import (
    accumulation_type,
    check_count,
    check_eps,
    check_input,
    real_only,
    real_sum,
    row_count,
    tame_padding,
)
from fusednorm.torch_support.recomputation import Run, Runs, recomputing

__all__ = ["PowerNorm"]

_disable: Any = torch.compiler.disable  # mypy: it has no types


class _PowerNormFunction(torch.autograd.Function):
    """Rows times ``rstd``, then affine; the backward is PowerNorm's, and moves the module's nu."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        real: Tensor | None,
        rstd: Tensor,
        count: Tensor,
        module: "PowerNorm",
        run: Run,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias, real, rstd, count)
        ctx.module, ctx.run = module, run
        run.sequence = ctx._sequence_nr()
        y = input.to(rstd.dtype) * (rstd if weight is None else rstd * weight)
        return (y if bias is None else y.add_(bias)).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fusednorm.PowerNorm: second derivatives are refused: the gradient is an approximation that "
                "remembers earlier batches, no function of the input; got a backward with create_graph=True"
            )
        input, weight, bias, real, rstd, count = ctx.saved_tensors
        module = ctx.module
        x_hat = tame_padding(input.to(rstd.dtype) * rstd, real)
        grad = grad_output.contiguous().to(rstd.dtype)
        grad_x_hat = grad * x_hat
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad_x_hat.sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).to(bias.dtype)
        mean_g_x_hat = real_sum(grad_x_hat, real) / count
        if weight is not None:
            mean_g_x_hat *= weight
        del grad_x_hat  # the next takes its memory
        if ctx.needs_input_grad[0]:
            dx = x_hat * (-rstd * module.running_projection.to(rstd.dtype))
            if real is not None:
                dx.mul_(real.to(rstd.dtype))  # padding is in no statistic
            grad_input = dx.addcmul_(grad, rstd if weight is None else rstd * weight).to(input.dtype)
        module._track_backward(real_sum(x_hat.square_(), real) / count, mean_g_x_hat)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


_power_norm: Any = _PowerNormFunction.apply  # mypy: untyped in torch 2.11, typed in 2.15


class PowerNorm(nn.Module):
    r"""PowerNorm (Shen, Yao, Gholami, Mahoney and Keutzer 2020): BatchNorm without its batch noise.

    .. math:: \hat x = x / \sqrt{\psi^2 + \epsilon}, \qquad y = w \hat x + b

    with :math:`\psi^2`, per feature, the running quadratic mean *before* this step; then
    :math:`\psi^2 \leftarrow a \psi^2 + (1 - a) \, \mathrm{mean}(x^2)`. In the first ``warmup_iters`` forwards
    the batch's own :math:`\mathrm{mean}(x^2)` stands for it, and :math:`\psi^2` is the average of those.
    Evaluation uses :math:`\psi^2`. The backward is the paper's approximation, not the derivative: with
    :math:`g = w \, \partial L / \partial y`,

    .. math:: \partial L / \partial x = (g - \nu \hat x) / \sqrt{\psi^2 + \epsilon}, \qquad
        \nu \leftarrow \nu \, (1 - (1 - a) \, \mathrm{mean}(\hat x^2)) + (1 - a) \, \mathrm{mean}(g \hat x)

    where :math:`\nu` diverges if :math:`\mathrm{mean}(\hat x^2)` stays above :math:`2 / (1 - a)`. Warm-up
    brings :math:`\psi^2` to the scale of the data first, and group scaling bounds the input.

    Args:
        num_features: C.
        eps: added to :math:`\psi^2`, and to the mean square of a group.
        alpha_fwd, alpha_bkw: a of :math:`\psi^2` and of :math:`\nu`, from 0 to 1.
        affine: weight (1 at first) and bias (0), per feature.
        warmup_iters: see above; the authors' code has 10000 too.
        num_groups: first divide each position's features, in that many groups, by the root of the group's
            mean square (plus eps); the authors' code does so with one group. None: not.
        device, dtype: of parameters and buffers; the buffers of 16-bit parameters are fp32.

    Shape:
        input ``[B, C]`` or ``[B, T, C]``; mask ``[B]`` or ``[B, T]``, bool, True where real; output as input.
        Padded positions are in no mean, and their gradient has no :math:`\nu` term.

    Buffers ``running_mean_square`` (:math:`\psi^2`, 1 at first), ``running_projection`` (:math:`\nu`, 0) and
    ``num_batches_tracked`` are in ``state_dict``. Forwards in training move the first and the last, each
    backward moves :math:`\nu` (and uses it as it then stands). A recomputation under
    ``torch.utils.checkpoint`` moves nothing and sees what its first run saw. Means are of one process.

    Under ``torch.compile`` training breaks the graph here; evaluation does not.

    Raises:
        ValueError: an option out of range; input or mask of the wrong shape, dtype or device; a mask of
            padding only in training (to see that, a call with a mask waits for a GPU).
        RuntimeError: a backward with ``create_graph=True``: second derivatives are refused.
    """

    __module__ = "fusednorm"  # what pickles call it

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean_square: Tensor
    running_projection: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        alpha_fwd: float = 0.9,
        alpha_bkw: float = 0.9,
        affine: bool = True,
        warmup_iters: int = 10000,
        num_groups: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_eps("PowerNorm", eps)
        for name, alpha in (("alpha_fwd", alpha_fwd), ("alpha_bkw", alpha_bkw)):
            if not 0 <= alpha <= 1:
                raise ValueError(f"fusednorm.PowerNorm: {name}: expected a number from 0 to 1, got {alpha}")
        if warmup_iters < 0:
            raise ValueError(f"fusednorm.PowerNorm: warmup_iters: expected 0 or more, got {warmup_iters}")
        if num_groups is not None and (num_groups < 1 or num_features % num_groups):
            raise ValueError(
                f"fusednorm.PowerNorm: num_groups: expected a divisor of num_features = {num_features}, "
                f"got {num_groups}"
            )
        self.num_features = num_features
        self.eps = eps
        self.alpha_fwd = alpha_fwd
        self.alpha_bkw = alpha_bkw
        self.affine = affine
        self.warmup_iters = warmup_iters
        self.num_groups = num_groups
        for name in ("weight", "bias"):
            values = torch.empty(num_features, device=device, dtype=dtype) if affine else None
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        wide = accumulation_type(dtype or torch.get_default_dtype())
        for name in ("running_mean_square", "running_projection"):
            self.register_buffer(name, torch.empty(num_features, device=device, dtype=wide))
        self.register_buffer("num_batches_tracked", torch.empty((), device=device, dtype=torch.long))
        self._runs = Runs()
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """As if nothing had been seen: mean squares 1, projection 0, no batches."""
        self.running_mean_square.fill_(1)
        self.running_projection.zero_()
        self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0, and no batches seen."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes ``input`` of shape ``[B, C]`` or ``[B, T, C]``; ``mask`` is True where it is real."""
        check_input("PowerNorm", input, mask, self.num_features)
        if self.num_groups is not None:
            cols = self.num_features // self.num_groups
            groups = input.reshape(*input.shape[:-1], self.num_groups, cols)
            rows = functional.rms_norm(groups, (cols,), None, self.eps).flatten(0, -3).flatten(1)
        else:
            rows = input.flatten(0, -2).contiguous()
        real = None if mask is None else mask.reshape(-1, 1)
        train = self.training and rows.shape[0] > 0
        return (self._train(rows, real, input.shape) if train else self._evaluate(rows)).view(input.shape)

    def _evaluate(self, rows: Tensor) -> Tensor:
        x = rows.to(accumulation_type(rows.dtype))
        scale = (self.running_mean_square.to(x.dtype) + self.eps).rsqrt()
        y = x * (scale if self.weight is None else scale * self.weight)
        return (y if self.bias is None else y + self.bias).to(rows.dtype)

    @_disable(reason="fusednorm.PowerNorm: in training, its backward moves state")  # type: ignore[untyped-decorator]
    def _train(self, rows: Tensor, real: Tensor | None, shape: torch.Size) -> Tensor:
        with torch.no_grad():
            x = rows.to(accumulation_type(rows.dtype))
            count = row_count(x, real)
            if real is not None:
                check_count("PowerNorm", count, 1, shape, True)
            mean_square = real_only(x, real).square().sum(0) / count
        if recomputing():
            run = self._runs.again(mean_square, "PowerNorm")
        else:
            run = self._runs.first(mean_square, self._track_forward(mean_square))
        rstd = (run.used + self.eps).rsqrt()
        arguments = (rows, self.weight, self.bias, real, rstd, count, self, run)
        return _power_norm(*arguments)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track_forward(self, mean_square: Tensor) -> Tensor:
        """Takes a batch into psi squared; what it is to be normalized by comes back."""
        running = self.running_mean_square.to(mean_square.dtype)
        step = self.num_batches_tracked.add_(1)
        warming_up = step <= self.warmup_iters  # on the device: reading the step would wait for it
        used = torch.where(warming_up, mean_square, running)
        factor = torch.where(warming_up, 1 / step.to(running.dtype), 1 - self.alpha_fwd)
        self.running_mean_square.copy_(torch.lerp(running, mean_square, factor))
        return used

    def _track_backward(self, mean_x_hat_square: Tensor, mean_g_x_hat: Tensor) -> None:
        """Takes a batch's gradient into nu."""
        nu, step = self.running_projection.to(mean_g_x_hat.dtype), 1 - self.alpha_bkw
        self.running_projection.copy_(nu * (1 - step * mean_x_hat_square) + step * mean_g_x_hat)

    def extra_repr(self) -> str:
        """The options; ``num_groups`` where there are any."""
        text = (
            f"{self.num_features}, eps={self.eps}, alpha_fwd={self.alpha_fwd}, alpha_bkw={self.alpha_bkw}, "
            f"affine={self.affine}, warmup_iters={self.warmup_iters}"
        )
        return text if self.num_groups is None else f"{text}, num_groups={self.num_groups}"
