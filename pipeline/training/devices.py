"""Which device each rank computes on, and how messages travel between them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from pipeline.training import rendezvous
from pipeline.training.settings import PrecisionSettings, Settings
from pipeline.training.toolchain import check_toolchain

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Devices:
    """The device of every rank and what carries messages between processes."""

    type: str
    """"cpu" or "cuda"."""
    shared: bool
    """Several ranks compute on one device's memory, so that no single rank's peak can be told apart."""
    backend: str
    """"gloo" or "nccl"."""

    def of(self, local_rank: int) -> torch.device:
        """The device of the rank with this number on its machine."""
        if self.type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_devices(settings: Settings) -> Devices:
    """The devices that `settings` ask for and this machine has.

    Raises:
        ValueError: `device=cuda` without a GPU or with fewer GPUs than ranks on this machine, or a precision that the
            GPU lacks, or `compile=true` where nothing can compile.
    """
    devices = _chosen(settings)
    if settings.compile:
        check_toolchain(devices.type)
    return devices


def _chosen(settings: Settings) -> Devices:
    in_process = settings.launch == "in_process"
    ranks_here = _ranks_here(settings)
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    needed = 1 if in_process or settings.share_gpu else ranks_here
    if settings.device == "cuda" and gpus < needed:
        raise ValueError(_too_few_gpus(gpus, needed, settings.dp))
    if settings.device == "cpu" or gpus < needed:
        return Devices("cpu", shared=in_process, backend="gloo")
    _check_gpu_precision(settings.precision)
    shared = in_process or (settings.share_gpu and gpus < ranks_here)
    return Devices("cuda", shared, backend="gloo" if shared or settings.transport == "gloo" else "nccl")


def warn_of_slow_choices(settings: Settings, devices: Devices) -> None:
    """One line for each choice that works but is slow here."""
    if devices.type != "cpu":
        return
    gpus = torch.cuda.device_count() if settings.device == "auto" else 0
    if gpus:
        few, ranks = _count(gpus), _ranks_here(settings)
        _log.warning("%s for %d ranks: using the CPU; share_gpu=true lets the ranks share GPUs", few, ranks)
    cores = os.cpu_count() or 1
    if settings.launch == "processes" and settings.ranks > cores:
        _log.warning(
            "%d ranks share %d CPU cores: times and bubbles are those of a crowded machine", settings.ranks, cores
        )
    if settings.precision.autocast == "float16":
        _log.warning("fp16 is emulated on a CPU and many times slower than fp32: use precision=bf16 or fp32 for speed")


def _ranks_here(settings: Settings) -> int:
    """How many ranks this machine gets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", settings.ranks)) if rendezvous.is_launched() else settings.ranks


def _check_gpu_precision(precision: PrecisionSettings) -> None:
    wanted = "bfloat16" in (precision.autocast, precision.parameters)
    if wanted and not torch.cuda.is_bf16_supported(including_emulation=False):
        gpu = torch.cuda.get_device_name()
        raise ValueError(f"precision={precision.name} is not supported by this GPU ({gpu}): use precision=fp16 or fp32")


def _too_few_gpus(gpus: int, needed: int, dp: int) -> str:
    if gpus == 0:
        return f"device=cuda needs {_count(needed)} and this machine has none: use device=cpu"
    return (
        f"device=cuda needs a GPU for each of {needed} ranks and this machine has {gpus}: use share_gpu=true or "
        f"launch=in_process, or {f'pp={gpus}' if dp == 1 else f'pp x dp = {gpus}'}"
    )


def _count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
