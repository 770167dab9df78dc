"""What the ranks of the side-by-side measurements run: the engines' steps in turn, in the same processes."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from pipeline.engine.transport import Transport
from pipeline.training import rendezvous
from pipeline.training.allocator import keep_freed_memory
from pipeline.training.group import DistributedGroup
from pipeline.training.memory import peak_memory_bytes, reset_peak_memory
from pipeline.training.plan import Plan
from pipeline.training.transports import open_transport
from tests.benchmarks.cases import CASES, CPU, Case
from tests.benchmarks.engines import Alone, Engine, Ours, Torch, clear, error

TIMEOUT = 120.0
ALONE = "alone"
TOLERANCE = 1e-4
LEAST_ROUNDS = 3
Send = Callable[[object], None]


@dataclass(frozen=True)
class Work:
    """A case, and its plans by what each is called."""

    case: Case
    plans: Mapping[str, Plan]
    rounds: int
    seconds: float
    """After this long no new round begins, but for the first three."""
    torch: bool = True
    """Whether torch's engine takes part."""


@dataclass(frozen=True)
class Times:
    """What one rank measured: seconds of each round by engine ("alone", "1f1b", "torch 1f1b"), and errors likewise."""

    rank: int
    seconds: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, float]


def alternate(work: Work, send: Send) -> None:
    """Time every engine once a round, in turn, each between two barriers, after one step that is not timed.

    Raises:
        ValueError: an engine's gradients are not those of the plain loop.
    """
    rank = _join()
    alone = Alone(work.case)
    engines: dict[str, Engine] = {ALONE: alone}
    for name, plan in work.plans.items():
        engines[name] = Ours(work.case, plan, rank, _transport(plan, rank))
        if work.torch:
            engines[f"torch {name}"] = Torch(work.case, plan, rank)
    errors = _warm_up(engines, alone)
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    deadline = time.monotonic() + work.seconds
    while len(seconds[ALONE]) < work.rounds and (len(seconds[ALONE]) < LEAST_ROUNDS or _before(deadline)):
        for name, engine in engines.items():
            seconds[name].append(_timed(engine))
    send(Times(rank, {name: tuple(values) for name, values in seconds.items()}, errors))
    rendezvous.leave()


@dataclass(frozen=True)
class MemoryWork:
    """One engine, in processes of its own."""

    case: Case
    plan: Plan
    torch: bool
    steps: int


def remember(work: MemoryWork, send: Send) -> None:
    """Send the bytes that the peak of a few steps is above what was resident before them, weights in place."""
    rank = _join()
    _use_libraries()
    engine: Engine
    if work.torch:
        engine = Torch(work.case, work.plan, rank)
    else:
        engine = Ours(work.case, work.plan, rank, _transport(work.plan, rank))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    for _ in range(work.steps):
        clear(engine)
        dist.barrier()
        engine.step()
    after = peak_memory_bytes(CPU)
    assert before is not None, "Linux"
    assert after is not None, "Linux"
    send(after - before)
    rendezvous.leave()


def _transport(plan: Plan, rank: int) -> Transport:
    """What a run of the product would use here."""
    group = DistributedGroup(rank, plan.schedule.pp, tied=[], backend="gloo", timeout=TIMEOUT)
    return open_transport(plan, group, CPU, backend="gloo", timeout=TIMEOUT)


def _use_libraries() -> None:
    """A little of everything: what the libraries allocate once is no engine's."""
    Alone(CASES["tiny"]).step()
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    convolution(torch.randn(2, 3, 8, 8)).sum().backward()


def _join() -> int:
    torch.set_num_threads(1)
    keep_freed_memory()  # for all alike
    rendezvous.join(TIMEOUT)
    return rendezvous.rank()


def _warm_up(engines: Mapping[str, Engine], alone: Alone) -> dict[str, float]:
    """The first steps, and how far each engine's gradients and loss are from the plain loop's."""
    errors = {}
    for name, engine in engines.items():
        engine.step()
        if isinstance(engine, Torch):  # exchanges shapes in its first step, and leaves gradients of that
            clear(engine)
            engine.step()
        errors[name] = error(engine, alone)
        if errors[name] > TOLERANCE:
            raise ValueError(f"{name} is off by {errors[name]:.1e}, more than {TOLERANCE}: not the same work")
        if engine is not alone:
            clear(engine)
    return errors


def _before(deadline: float) -> bool:
    """Whether rank 0 finds that there is time left; every rank must ask."""
    left = torch.tensor(time.monotonic() < deadline)
    dist.broadcast(left, src=0)
    return bool(left)


def _timed(engine: Engine) -> float:
    clear(engine)
    gc.collect()  # what the engine before has left is not this one's to pay for
    dist.barrier()
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start
