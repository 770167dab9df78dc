"""Which transport carries a run's messages between processes, and how it is opened."""

from __future__ import annotations

import logging
import os
from uuid import uuid4

import torch

# torch.distributed has this name too, but mypy finds no type by that way.
from torch._C._distributed_c10d import PrefixStore

from pipeline.engine.buffers import BufferPool
from pipeline.engine.distributed import DistributedTransport, channels, open_channels
from pipeline.engine.links import Incoming, Outgoing, close_links, host, open_links
from pipeline.engine.shared_memory import SharedMemoryTransport
from pipeline.engine.transport import Transport
from pipeline.schedule.actions import ActionType
from pipeline.schedule.buffers import peak_buffers
from pipeline.schedule.schedule import Channel, message
from pipeline.training import rendezvous
from pipeline.training.group import Group
from pipeline.training.plan import Plan

_log = logging.getLogger(__name__)

Links = tuple[dict[Channel, Incoming], dict[Channel, Outgoing]]


def open_transport(
    plan: Plan, group: Group, device: torch.device, *, backend: str, timeout: float, choice: str = "auto"
) -> Transport:
    """This rank's end of every channel of the plan's programs; every rank must call this with the same plan.

    Shared memory where all ranks compute on the CPUs of one host, else one communicator a channel: NCCL's between GPUs,
    gloo's between hosts, or between ranks that share a GPU.

    Args:
        group: all ranks.
        device: where messages are wanted.
        backend: "nccl" or "gloo".
        timeout: seconds that a message may take.
        choice: "gloo" does without shared memory.
    """
    (rank,) = group.local
    used = channels([plan.program, plan.evaluation], plan.dp)
    size, count = buffers(plan, rank)
    if device.type == "cpu" and choice == "auto":
        links = _links(used, rank, group)
        if links is not None:
            crowded = group.size > len(os.sched_getaffinity(0))
            return SharedMemoryTransport(*links, size=size, count=count, timeout=timeout, crowded=crowded)
    groups = open_channels(used, rank, backend, timeout)
    return DistributedTransport(groups, device, backend, timeout, BufferPool(size, count))


def buffers(plan: Plan, rank: int) -> tuple[int, int]:
    """What a rank receives into: the bytes of the largest tensor, and the most boundary buffers that it holds."""
    received = {
        message(action).boundary + 1
        for program in (plan.program, plan.evaluation)
        for action in program.rows[rank % program.pp]
        if action.type in (ActionType.RECV_F, ActionType.RECV_B)
    }
    messages = [found[stage].message("activation") for found in plan.boundaries.values() for stage in received]
    largest = max((spec.nbytes for tensors in messages for spec in tensors), default=0)
    place = rank % plan.schedule.pp
    messages_at_once = max(peak_buffers(program, place) for program in (plan.program, plan.evaluation))
    return largest, messages_at_once * max(map(len, messages), default=1)


def _links(used: tuple[Channel, ...], rank: int, group: Group) -> Links | None:
    """Pipes and memory shared with every neighbor; None on all ranks unless it works on all."""
    hosts = group.gather([(host(), uuid4().hex)])
    if len({name for name, _ in hosts}) > 1 or not hosts[0][0]:
        return None
    links, reason = None, ""
    try:
        links = open_links(used, rank, PrefixStore(hosts[0][1], rendezvous.shared_store()))
    except OSError as error:
        reason = str(error)
    reasons = list(filter(None, group.gather([reason])))
    if reasons and links is not None:
        close_links(*links)
    if reasons and rank == 0:
        _log.warning("ranks can't share memory (%s): messages go over gloo", reasons[0])
    return None if reasons else links
