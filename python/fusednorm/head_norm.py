"""A norm over each attention head's ``head_dim``, with a weight for every head."""

import math

import torch
from torch import Tensor, nn

from fusednorm import functional

__all__ = ["HeadNorm"]


class HeadNorm(nn.Module):
    r"""RMSNorm or LayerNorm of every head's query (or key), before attention: QK normalization.

    .. math:: y_h = \mathrm{Norm}(x_h) \cdot w_h + b_h

    Henry et al. 2020 ("Query-Key Normalization for Transformers") normalize queries and keys over
    ``head_dim`` so that their products are bounded; Dehghani et al. 2023 (ViT-22B) do it by LayerNorm without
    biases, which keeps the attention logits of large models from growing.

    Where all heads share one weight of shape ``(head_dim,)``, ``fusednorm.RMSNorm(head_dim)`` or
    ``LayerNorm(head_dim)`` is the better choice: one kernel, which keeps only its input for backward. Here
    the heads' weights are one more pass over memory, and the normalized input is kept too, in fp32 (fp64).
    Either way the input is read where it lies, in forward and backward: the q and k slices of a packed
    projection and transposed views are not copied.

    Args:
        num_heads, head_dim: H and D.
        kind: "rms" or "layer".
        head_axis: where H stands: -2 for ``[B, T, H, D]``, -3 for ``[B, H, T, D]``.
        eps: added to the mean square or the variance. None, for "rms" only: see
            :func:`fusednorm.functional.rms_norm`.
        bias: whether there is a bias of shape ``(H, D)``, for "layer" only.
        device, dtype: of weight and bias.

    Shape:
        input ``[*, H, D]``, with ``head_axis=-3`` ``[*, H, T, D]``; output the same, contiguous, of the
        input's dtype. The product with the weight is formed in fp32 (fp64), and rounded once.

    Raises:
        ValueError: a wrong option; an input without H heads of D elements where they should be.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        kind: str = "rms",
        head_axis: int = -2,
        eps: float | None = 1e-6,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        def check(holds: bool, argument: str, expected: str, got: object) -> None:
            if not holds:
                raise ValueError(f"fusednorm.HeadNorm: {argument}: expected {expected}, got {got!r}")

        check(num_heads > 0, "num_heads", "a positive number", num_heads)
        check(head_dim > 0, "head_dim", "a positive number", head_dim)
        check(kind in ("rms", "layer"), "kind", '"rms" or "layer"', kind)
        check(head_axis in (-2, -3), "head_axis", "-2 ([B, T, H, D]) or -3 ([B, H, T, D])", head_axis)
        check(not (bias and kind == "rms"), "bias", 'False with kind="rms"', bias)
        check(eps is not None or kind == "rms", "eps", 'a number with kind="layer"', eps)
        check(eps is None or math.isfinite(eps), "eps", "a finite number", eps)
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.kind, self.head_axis, self.eps = kind, head_axis, eps
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _normalized(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        """x_hat, in the accumulation type."""
        shape, eps, ops = (self.head_dim,), self.eps, torch.ops.fusednorm
        x_hat: Tensor
        if eps is None or self.kind == "rms":
            if input.dtype == dtype:
                return functional.rms_norm(input, shape, eps=eps)
            x_hat = ops.rms_norm_forward.default(input, shape, None, eps, out_dtype=dtype)[0]
        elif input.dtype == dtype:
            return functional.layer_norm(input, shape, eps=eps)
        else:
            x_hat = ops.layer_norm_forward.default(input, shape, None, None, eps, out_dtype=dtype)[0]
        return x_hat

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, H, D]`` or ``[*, H, T, D]`` over D."""
        heads = self.head_axis
        if input.dim() < -heads or input.shape[heads] != self.num_heads or input.shape[-1] != self.head_dim:
            h, d = self.num_heads, self.head_dim
            expected = f"[*, {h}, {d}]" if heads == -2 else f"[*, {h}, T, {d}]"
            raise ValueError(
                f"fusednorm.HeadNorm: input: expected shape {expected} (head_axis={heads}), "
                f"got {list(input.shape)}"
            )
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32

        def per_head(name: str, parameter: Tensor) -> Tensor:
            if parameter.shape != (self.num_heads, self.head_dim):
                raise ValueError(
                    f"fusednorm.HeadNorm: {name}: expected shape {[self.num_heads, self.head_dim]}, "
                    f"got {list(parameter.shape)}"
                )
            # torch 2.11, compiled: a conversion to its own dtype cuts the gradient.
            parameter = parameter if parameter.dtype == wide else parameter.to(wide)
            return parameter if heads == -2 else parameter.unsqueeze(-2)

        output = self._normalized(input, wide) * per_head("weight", self.weight)
        if self.bias is not None:
            output = output + per_head("bias", self.bias)
        return output if output.dtype == input.dtype else output.to(input.dtype)

    def extra_repr(self) -> str:
        """The arguments, short."""
        return (
            f"{self.num_heads}, {self.head_dim}, kind={self.kind!r}, head_axis={self.head_axis}, "
            f"eps={self.eps}, bias={self.bias is not None}"
        )
