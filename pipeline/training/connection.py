"""How a process that was started for one rank joins the others."""

from __future__ import annotations

import os

import torch

from pipeline.engine.standing import Marker
from pipeline.engine.transport import Transport
from pipeline.training import rendezvous
from pipeline.training.agreement import check_same_plan
from pipeline.training.devices import Devices
from pipeline.training.group import DistributedGroup, Group
from pipeline.training.plan import Plan
from pipeline.training.settings import Settings
from pipeline.training.transports import open_transport


def own_device(devices: Devices) -> torch.device:
    """This process's, from now on its current one."""
    device = devices.of(int(os.environ.get("LOCAL_RANK", rendezvous.rank())))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def connect(
    settings: Settings, plan: Plan, device: torch.device, backend: str, marker: Marker | None = None
) -> tuple[Group, Transport]:
    """The group of all ranks, and this rank's end of what carries messages; torch's process group must be there.

    Args:
        plan: the same in every process.
        device: this process's.
        backend: "nccl" or "gloo".
        marker: shows when this rank waits for others.

    Raises:
        PlanMismatchError: the processes have different plans.
    """
    group = DistributedGroup(
        rendezvous.rank(),
        settings.ranks,
        dp=settings.dp,
        tied=list(plan.tied_ranks().values()),
        backend=backend,
        timeout=settings.timeout,
        marker=marker,
    )
    check_same_plan(plan, group)
    timeout, choice = settings.timeout, settings.transport
    return group, open_transport(plan, group, device, backend=backend, timeout=timeout, choice=choice)
