"""What the ranks of test_clocks.py run, importable so that it can be pickled by name.

Rank 1 is made to look like a rank of another machine: its clock is ahead and drifts, and its name is another.
"""

from __future__ import annotations

import time

import torch

from pipeline.engine.boundary import TensorSpec
from pipeline.training import clocks, rendezvous
from pipeline.training.clocks import SharedClock
from pipeline.training.group import DistributedGroup
from pipeline.training.messages import Finished
from pipeline.training.plan import make_plan
from pipeline.training.rank import Rank
from pipeline.training.trainer import Trainer
from pipeline.training.transports import open_transport
from tests.engine.harness import CPU, placement
from tests.engine.samples import linears
from tests.training.harness import settings_to_train, vector_data

AHEAD, DRIFT = 1000.0, 1e-3
_true = time.perf_counter


def _shown(moment):
    return AHEAD + (1 + DRIFT) * moment if rendezvous.rank() == 1 else moment


def _move_away():
    if rendezvous.rank() == 1:
        time.perf_counter = lambda: _shown(_true())
        clocks.clock_name = lambda: "another machine"


def times(_, send):
    """By how much each rank's times, turned into rank 0's, are off."""
    rendezvous.join(timeout=60)
    _move_away()
    group = DistributedGroup(rendezvous.rank(), 2, tied=[], backend="gloo", timeout=60)
    clock, truth = SharedClock(group), []
    for _ in range(200):
        truth.append(_true())
        group.gather_floats([0.0])
    clock.update()
    send(
        (
            rendezvous.rank(),
            max(abs(a - b) for a, b in zip(clock.to_rank_0(list(map(_shown, truth))), truth, strict=True)),
        )
    )
    rendezvous.leave()


def train(steps, send):
    """A run of two processes; rank 0 sends what it ends with."""
    rendezvous.join(timeout=60)
    _move_away()
    rank = rendezvous.rank()
    settings, model, data = settings_to_train("1f1b", 2, 4, 8, steps), linears(4), vector_data(8)
    plan = make_plan(settings, model, TensorSpec.of(data.train.inputs(0)), CPU)
    group = DistributedGroup(rank, 2, tied=[], backend="gloo", timeout=60)
    transport = open_transport(plan, group, CPU, backend="gloo", timeout=60)
    ranks = [Rank(rank, plan, model, placement(torch.float32, settings.seed), transport, settings.optimizer)]
    options = {"validation_batches": 1, "shared_memory": False}
    report = lambda message: send(message) if isinstance(message, Finished) else None  # noqa: E731
    Trainer(settings, plan, ranks, model.loss, data, group, report=report, **options).train()
    rendezvous.leave()
