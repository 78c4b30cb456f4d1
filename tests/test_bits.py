"""The bits of every operator are the recorded ones; see bits.py for what a change of bits on purpose does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bits
from conftest import TEST_DEVICE

ROOT = Path(__file__).resolve().parent


@pytest.mark.skipif(bool(TEST_DEVICE), reason="hashes are of kernels that run on the CPU")
def test_bits_are_the_recorded_ones() -> None:
    name, recorded = bits.instruction_set(), json.loads(bits.PATH.read_text())
    if name not in recorded:
        pytest.skip(f"no hashes of {name} are recorded: no machine with it was at hand")
    wrong, compared = bits.differences(recorded[name])
    assert compared > 2000  # of the cases that were recorded
    assert not wrong, "\n".join(wrong)


def test_a_changed_bit_is_found() -> None:
    recorded = json.loads(bits.PATH.read_text())
    known = recorded.get(bits.instruction_set())
    if known is None:
        pytest.skip("nothing is recorded")
    label = "layer_norm f32 plain wb"
    line = known["hashes"][label]
    known["hashes"] = {**known["hashes"], label: ("0" if line[0] != "0" else "1") + line[1:]}
    assert bits.differences(known, [label])[0] == [f"{label}: expected {known['hashes'][label]}, got {line}"]


def test_an_instruction_set_without_hashes_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "none.json"
    empty.write_text("{}")
    command = [sys.executable, str(ROOT / "bits.py"), "--check", "--file", str(empty)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 1 and "no hashes recorded" in run.stderr
