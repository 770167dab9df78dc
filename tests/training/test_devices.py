from __future__ import annotations

import logging

import pytest
import torch

from pipeline.training.devices import Devices, choose_devices, warn_of_slow_choices
from pipeline.training.settings import PrecisionSettings, Settings


@pytest.fixture
def machine(monkeypatch):
    """Pretends that the machine has some GPUs and cores."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def build(gpus=0, cores=8, bf16=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
        # emulated bf16 is there on every GPU; the question must be asked without it
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16
        )
        monkeypatch.setattr("os.cpu_count", lambda: cores)

    return build


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, {}, Devices("cpu", False, "gloo")),
        (0, {"launch": "in_process"}, Devices("cpu", True, "gloo")),
        (1, {}, Devices("cpu", False, "gloo")),
        (2, {}, Devices("cuda", False, "nccl")),
        (2, {"device": "cpu"}, Devices("cpu", False, "gloo")),
        (1, {"share_gpu": True}, Devices("cuda", True, "gloo")),
        (2, {"share_gpu": True}, Devices("cuda", False, "nccl")),
        (1, {"launch": "in_process"}, Devices("cuda", True, "gloo")),
        (2, {"device": "cuda"}, Devices("cuda", False, "nccl")),
    ],
)
def test_what_is_chosen(machine, gpus, options, expected):
    machine(gpus)
    chosen = choose_devices(Settings(pp=2, **options))
    assert (chosen.type, chosen.backend) == (expected.type, expected.backend)
    assert chosen.shared == expected.shared


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {}, "device=cuda needs 2 GPUs and this machine has none: use device=cpu"),
        (1, {}, "this machine has 1: use share_gpu=true or launch=in_process, or pp=1"),
        (0, {"share_gpu": True}, "device=cuda needs 1 GPU and this machine has none"),
        (0, {"launch": "in_process"}, "device=cuda needs 1 GPU and this machine has none"),
    ],
)
def test_too_few_gpus_are_refused(machine, gpus, options, message):
    machine(gpus)
    with pytest.raises(ValueError, match=message):
        choose_devices(Settings(pp=2, device="cuda", **options))


def test_a_precision_that_the_gpu_lacks_is_refused(machine):
    machine(gpus=2, bf16=False)
    bf16 = PrecisionSettings("bf16", "float32", "bfloat16")
    with pytest.raises(ValueError, match=r"precision=bf16 is not supported by this GPU \(an old GPU\): use"):
        choose_devices(Settings(precision=bf16))
    with pytest.raises(ValueError, match=r"precision=bf16_true is not supported by this GPU"):
        choose_devices(Settings(precision=PrecisionSettings("bf16_true", "bfloat16", masters="float32")))
    assert choose_devices(Settings(precision=bf16, device="cpu")).type == "cpu"
    machine(gpus=2, bf16=True)
    assert choose_devices(Settings(precision=bf16)).type == "cuda"


def warnings(settings, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_slow_choices(settings, choose_devices(settings))
    return [record.getMessage() for record in caplog.records]


def test_slow_choices_are_told_in_one_line_each(machine, caplog):
    machine(cores=2)
    assert warnings(Settings(pp=2), caplog) == []
    (crowded,) = warnings(Settings(pp=3), caplog)
    assert crowded.startswith("3 ranks share 2 CPU cores")
    assert warnings(Settings(pp=3, launch="in_process"), caplog) == []
    (slow,) = warnings(Settings(precision=PrecisionSettings("fp16", "float32", "float16")), caplog)
    assert "fp16 is emulated on a CPU" in slow
    machine(gpus=1)
    (few,) = warnings(Settings(pp=2), caplog)
    assert few.startswith("1 GPU for 2 ranks: using the CPU")


def test_each_rank_has_its_device(monkeypatch):
    assert Devices("cpu", False, "gloo").of(3) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [Devices("cuda", True, "gloo").of(rank).index for rank in range(4)] == [0, 1, 0, 1]
