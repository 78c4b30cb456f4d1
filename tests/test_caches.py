"""The sizes of the caches decide how memory is reached, never the bits: a process for each set of sizes."""

import os
import subprocess
import sys

import pytest

# Outputs and gradients over both norms, the fused add and GroupNorm, rows on whole vectors and not.
PROGRAM = """
import hashlib, torch, fusednorm
ops, sha = torch.ops.fusednorm, hashlib.sha256()
def take(tensors):
    for t in tensors:
        sha.update(t.detach().contiguous().view(torch.uint8).numpy().tobytes())
def leaf(*shape, dtype):
    values = (torch.arange(torch.Size(shape).numel()) * 37 % 61 - 30) / 30
    return values.reshape(shape).to(dtype).requires_grad_()
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for rows, cols in ((1, 64), (9, 33), (13, 256), (70, 1023)):
        x, r = leaf(rows, cols, dtype=dtype), leaf(rows, cols, dtype=dtype)
        w, b = leaf(cols, dtype=dtype), leaf(cols, dtype=dtype)
        calls = [
            (ops.layer_norm(x, [cols], w, b, 1e-5), [x, w, b]),
            (ops.rms_norm(x, [cols], w, 1e-5), [x, w]),
            (ops.rms_norm(x, [cols], w, 1e-5, casting_mode="llama"), [x, w]),
            (ops.add_layer_norm(x, r, [cols], w, b, 1e-5), [x, r, w, b]),
            (ops.add_rms_norm(x, r, [cols], w, 1e-5), [x, r, w]),
        ]
        for outputs, leaves in calls:
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            take(outputs)
            outputs = [o for o in outputs if o.requires_grad]
            # Of the outputs' own shape, so that no stride is 0, and not the same for each column.
            grads = [leaf(*o.shape, dtype=o.dtype).detach() for o in outputs]
            take(torch.autograd.grad(outputs, leaves, grads))
    for format in (torch.contiguous_format, torch.channels_last):
        x = leaf(2, 32, 8, 8, dtype=dtype).detach().contiguous(memory_format=format).requires_grad_()
        w, b = leaf(32, dtype=dtype), leaf(32, dtype=dtype)
        y = ops.group_norm(x, 8, w, b, 1e-5)
        take([y])
        take(torch.autograd.grad([y], [x, w, b], [leaf(2, 32, 8, 8, dtype=dtype).detach()]))
print(sha.hexdigest())
"""


def digest(capability: str | None, l1: int | None, l2: int | None, last_level: int | None) -> str:
    """The hash of a process with these sizes; None: the machine's own."""
    env = dict(os.environ)
    names = ("ATEN_CPU_CAPABILITY", "FUSEDNORM_L1_BYTES", "FUSEDNORM_L2_BYTES", "FUSEDNORM_LAST_LEVEL_BYTES")
    for name, value in zip(names, (capability, l1, l2, last_level), strict=True):
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("capability", [None, "avx2", "default"])
def test_the_sizes_of_caches_change_no_bit(capability: str | None) -> None:
    """Also where tiny tensors stream and are asked for early, and where large ones never are."""
    expected = digest(capability, None, None, None)
    big = 1 << 40
    for l1, l2, last_level in ((64, big, 64), (big, big, 64), (1, 1, 1), (big, big, big)):
        assert digest(capability, l1, l2, last_level) == expected, (l1, l2, last_level)
