"""Joining the other ranks: the same code under the local launcher, torchrun and any that sets RANK, WORLD_SIZE..."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

# torch.distributed has these names too, but mypy finds no types by that way.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# Start-up waits for the slowest rank's imports and model; a step's own time limit is the process group's (`join`).
_START_TIMEOUT = timedelta(minutes=5)
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_agreed: dict[str, str] = {}


def is_launched() -> bool:
    """Whether a launcher started this process: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all set."""
    return all(os.environ.get(name) for name in _VARIABLES)


def rank() -> int:
    """This process's rank; 0 when nothing launched it."""
    return _number("RANK") if is_launched() else 0


def world_size() -> int:
    """Number of processes of the job; 1 when nothing launched it."""
    return _number("WORLD_SIZE") if is_launched() else 1


@functools.cache
def shared_store() -> Store:
    """The job's key-value store, opened once a process.

    A client of the launcher's store where there is one (TORCHELASTIC_USE_AGENT_STORE=True: our launcher, torchrun);
    otherwise rank 0 hosts it on MASTER_PORT. Raises ValueError when that port is taken.
    """
    hosts = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return _open_store(hosts)
    except dist.DistNetworkError as error:
        if not hosts:
            raise
        port = os.environ["MASTER_PORT"]
        raise ValueError(f"rank 0 cannot listen on MASTER_PORT ({port}): it is in use, use another port") from error


def new_store() -> Store:
    """Another connection to `shared_store`, for a thread: one that waits for a key keeps its connection busy."""
    return _open_store(hosts=False)


def _open_store(hosts: bool) -> Store:
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    store = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=_START_TIMEOUT)
    # The agent's store outlives a restart of the ranks, and what the attempt before wrote must not be read again.
    return PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(name: str, choose: Callable[[], str]) -> str:
    """Rank 0's choice, known to all ranks: `choose` runs on rank 0 only, once for each `name`.

    Works before the process group exists (from a Hydra resolver, for the run directory) and without a launcher.
    """
    if name not in _agreed:
        _agreed[name] = _ask(name, choose) if is_launched() else choose()
    return _agreed[name]


def _ask(name: str, choose: Callable[[], str]) -> str:
    store = shared_store()
    if rank() == 0:
        store.set(f"agree/{name}", choose())
    return store.get(f"agree/{name}").decode()


def join(timeout: float, backend: str = "gloo") -> None:
    """Initialize torch.distributed's default process group over the shared store, once every rank has got here.

    `timeout`: seconds that an operation may wait for another rank. Raises ValueError unless it is above 0.
    """
    if timeout <= 0:
        raise ValueError(f"timeout ({timeout}) must be above 0 seconds: use 300, say")
    limit = timedelta(seconds=timeout)
    _meet(max(limit, _START_TIMEOUT))
    dist.init_process_group(backend, store=shared_store(), rank=rank(), world_size=world_size(), timeout=limit)


def _meet(limit: timedelta) -> None:
    """Wait until every rank has started: that may take longer than anything that it does with others afterwards."""
    store = shared_store()
    store.set(f"here/{rank()}", "")
    store.wait([f"here/{other}" for other in range(world_size())], limit)


def leave() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _number(variable: str) -> int:
    value = os.environ[variable].strip()
    if not value.isdigit():
        raise ValueError(f"{variable} ({value!r}) in the environment must be a whole number: use the launcher's value")
    return int(value)
