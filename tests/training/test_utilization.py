"""A run's speed as a share of what its devices could do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.training.devices import Devices
from pipeline.training.plan import Plan
from pipeline.training.settings import PrecisionSettings, Settings
from pipeline.training.speed import Speed
from pipeline.training.utilization import known_peak, speed_of
from tests.engine.harness import plan_for, settings_for
from tests.engine.samples import linears, vectors

BF16 = PrecisionSettings("bf16", "float32", "bfloat16")
PURE = PrecisionSettings("bf16_true", "bfloat16")


def planned(flops: tuple[int, ...] | None) -> Plan:
    return replace(plan_for(settings_for("gpipe", 2, 2, 4), linears(3), vectors(4)[0]), flops=flops)


def test_speed_and_its_share() -> None:
    assert Speed(6 * 10**12, 4.0).of(2.0) == {"tflops_per_second": 3.0, "mfu": 0.75}
    assert Speed(6 * 10**12).of(2.0) == {"tflops_per_second": 3.0, "mfu": None}
    for speed, seconds in ((Speed(), 2.0), (Speed(1, 1.0), None), (Speed(1, 1.0), 0.0)):
        assert speed.of(seconds) == {"tflops_per_second": None, "mfu": None}


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA T400", None),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(device: str, peak: float | None) -> None:
    assert known_peak(device, BF16) == known_peak(device, PURE) == peak
    assert known_peak(device, PrecisionSettings()) is None


def test_a_run_has_as_many_devices_as_its_ranks_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = planned((10, 20, 30))

    def peak(devices: Devices, **options: Any) -> float | None:
        speed = speed_of(Settings(pp=4, precision=BF16, **options), plan, devices)
        assert speed.flops_per_step == 180
        return speed.peak_tflops

    assert peak(Devices("cuda", False, "nccl")) == 4 * 312
    assert peak(Devices("cuda", False, "nccl"), dp=3) == 12 * 312
    assert peak(Devices("cuda", True, "gloo"), share_gpu=True) == 2 * 312
    assert peak(Devices("cuda", True, "gloo"), launch="in_process") == 312
    assert peak(Devices("cuda", False, "nccl"), peak_tflops=100.0) == 400
    assert peak(Devices("cpu", False, "gloo")) is None
    assert peak(Devices("cpu", False, "gloo"), peak_tflops=0.5) == 2.0


def test_what_a_plan_tells_of_operations() -> None:
    plan = planned((10, 20, 30))
    assert (plan.flops_per_step, plan.stage_flops(0), plan.stage_flops(1)) == (180, 0.5, 0.5)
    assert (planned(None).flops_per_step, planned(None).stage_flops(0)) == (None, None)
    assert planned((0, 0, 0)).stage_flops(0) is None
    assert speed_of(Settings(), planned(None), Devices("cpu", False, "gloo")) == Speed()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_peak_that_is_no_speed_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"peak_tflops=.* is no speed: use one such as 312, or null"):
        Settings(peak_tflops=value).check()
