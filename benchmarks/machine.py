"""Names the machine that the numbers belong to."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import fusednorm


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = fields.get("cpu family")
    return f"{name} (family {family}, model {fields.get('model')})" if family else name


def last_level_cache_bytes() -> int | None:
    """The size of the largest cache, or None where the system does not tell."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", index.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


def huge_pages() -> str | None:
    """Whether huge pages are given always, on request (madvise) or never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
    return match[1] if match else None


def describe() -> dict[str, Any]:
    """All that a reader of the numbers needs to know of the machine."""
    build = fusednorm.build_info()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "l3_bytes": last_level_cache_bytes(),
        "capability": build["torch_cpu_capability"],
        "kernels": build["cpu_kernels"],
        "huge_pages": huge_pages(),
        "torch": torch.__version__,
        "load_before": [round(x, 2) for x in os.getloadavg()],
    }


def sentence(machine: dict[str, Any]) -> str:
    """The same in one line."""
    l3 = machine["l3_bytes"]
    return ", ".join(
        [
            f"{machine['cpu']}",
            f"{machine['cores']} cores",
            f"L3 {l3 >> 20} MiB" if l3 else "L3 unknown",
            f"{machine['capability']} (kernels {machine['kernels']})",
            f"huge pages {machine['huge_pages']}",
            f"torch {machine['torch']}",
            f"load {machine['load_before'][0]:g} before the run",
        ]
    )
