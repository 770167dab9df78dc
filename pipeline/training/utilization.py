"""What a run's devices could do at most: what its speed is a share of."""

from __future__ import annotations

import re

import torch

from pipeline.training.devices import Devices
from pipeline.training.plan import Plan
from pipeline.training.settings import PrecisionSettings, Settings
from pipeline.training.speed import Speed

PEAK_TFLOPS = {
    r"GB200": 2500.0,
    r"B200": 2250.0,
    r"H200 NVL": 835.5,
    r"H200|GH200": 989.4,
    r"H100 NVL": 835.5,
    r"H100 PCIe": 756.5,
    r"H100": 989.4,
    r"A100": 312.0,
    r"A40\b": 149.7,
    r"A30\b": 165.0,
    r"A10\b": 125.0,
    r"L40S": 362.0,
    r"L4\b": 121.0,
    r"V100-SXM": 125.0,
    r"V100": 112.0,
    r"\bT4\b": 65.0,
    r"RTX 4090": 165.2,
    r"RTX 3090\b(?! Ti)": 71.0,
    r"MI300X": 1307.4,
}
"""Dense TFLOP/s in 16 bits, added up in 32, by the device's name: the makers' data sheets. The first match counts.

Of float32 there is no such number: whether it means TensorFloat-32 is decided operation by operation.
"""


def speed_of(settings: Settings, plan: Plan, devices: Devices) -> Speed:
    """How the run's speed is told."""
    one = settings.peak_tflops
    if one is None and devices.type == "cuda":
        one = known_peak(torch.cuda.get_device_name(devices.of(0)), settings.precision)
    return Speed(plan.flops_per_step, None if one is None else one * _count(settings, devices))


def _count(settings: Settings, devices: Devices) -> int:
    """Devices that the ranks compute on; on CPUs each rank's share of them is one."""
    if not devices.shared:
        return settings.ranks
    return 1 if settings.launch == "in_process" else torch.cuda.device_count()


def known_peak(device: str, precision: PrecisionSettings) -> float | None:
    """TFLOP/s of the GPU of this name in the run's precision, if it is a known one.

    Args:
        device: as `torch.cuda.get_device_name` says.
    """
    if precision.autocast is None and precision.parameters != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(name, device)), None)
