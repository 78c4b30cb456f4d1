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
    ``LayerNorm(head_dim)`` is the better choice: one kernel over all rows. Here it is a kernel for each head
    on the CPU, whose outputs are then put together. Elsewhere it is one kernel for the normalized rows in
    fp32 (fp64), which are kept for backward, and a pass over them for the weight. Either way the input is
    read where it lies, in forward and backward: the q and k slices of a packed projection and transposed
    views are not copied.

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

    __module__ = "fusednorm"  # what pickles call it

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

    def _by_heads(self, input: Tensor) -> Tensor:
        """A kernel for each head.

        The same 2 x 512 x 16 x 64 elements in bf16 on one CPU thread, forward and backward: 0.8 ms, and 3.0
        the other way (fp32: 1.4 and 1.8), which only single tokens gain from (forward: 34 us and 11).
        """
        shape, eps = (self.head_dim,), self.eps
        heads, weights = input.unbind(self.head_axis), self.weight.unbind(0)
        if eps is None or self.kind == "rms":
            outputs = [functional.rms_norm(x, shape, w, eps) for x, w in zip(heads, weights, strict=True)]
        else:
            biases = [None] * self.num_heads if self.bias is None else self.bias.unbind(0)
            outputs = [
                functional.layer_norm(x, shape, w, b, eps)
                for x, w, b in zip(heads, weights, biases, strict=True)
            ]
        return torch.stack(outputs, self.head_axis)

    def _by_rows(self, input: Tensor) -> Tensor:
        """One kernel for x_hat in the accumulation type, then ATen: few launches on a GPU."""
        shape, eps, ops = (self.head_dim,), self.eps, torch.ops.fusednorm
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32

        def per_head(parameter: Tensor) -> Tensor:
            # torch 2.11, compiled: a conversion to its own dtype cuts the gradient.
            parameter = parameter if parameter.dtype == wide else parameter.to(wide)
            return parameter if self.head_axis == -2 else parameter.unsqueeze(-2)

        if eps is None or self.kind == "rms":
            output = ops.rms_norm_forward.default(input, shape, None, eps, out_dtype=wide)[0]
        else:
            output = ops.layer_norm_forward.default(input, shape, None, None, eps, out_dtype=wide)[0]
        output = output * per_head(self.weight)
        if self.bias is not None:
            output = output + per_head(self.bias)
        return output if wide == input.dtype else output.to(input.dtype)  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes ``input`` of shape ``[*, H, D]`` or ``[*, H, T, D]`` over D."""
        h, d, heads = self.num_heads, self.head_dim, self.head_axis
        if input.dim() < -heads or input.shape[heads] != h or input.shape[-1] != d:
            expected = f"[*, {h}, {d}]" if heads == -2 else f"[*, {h}, T, {d}]"
            raise ValueError(
                f"fusednorm.HeadNorm: input: expected shape {expected} (head_axis={heads}), "
                f"got {list(input.shape)}"
            )
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None and parameter.shape != (h, d):
                raise ValueError(
                    f"fusednorm.HeadNorm: {name}: expected shape {[h, d]}, got {list(parameter.shape)}"
                )
        return self._by_heads(input) if input.is_cpu else self._by_rows(input)

    def extra_repr(self) -> str:
        """The arguments, short."""
        return (
            f"{self.num_heads}, {self.head_dim}, kind={self.kind!r}, head_axis={self.head_axis}, "
            f"eps={self.eps}, bias={self.bias is not None}"
        )
