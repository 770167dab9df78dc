"""What the ranks of test_data_parallel.py's processes run, importable so that it can be pickled by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from models.model import Model
from pipeline.engine.boundary import TensorSpec
from pipeline.training import rendezvous
from pipeline.training.group import DistributedGroup
from pipeline.training.plan import make_plan
from pipeline.training.rank import Rank
from pipeline.training.ranks import Ranks
from pipeline.training.settings import OptimizerSettings
from pipeline.training.transports import open_transport
from tests.engine.harness import CPU, buffers_of, placement
from tests.engine.samples import chain, vectors
from tests.training.harness import FP64, settings_to_train

CASES = [("1f1b", "never"), ("zb_h1", "never"), ("1f1b", "always")]


def model() -> Model:
    """A BatchNorm on each of two ranks."""
    linear = partial(nn.Linear, 4, 4)
    return chain([linear, partial(nn.BatchNorm1d, 4), linear, partial(nn.BatchNorm1d, 4, momentum=None)])


def synced_steps(_: object, send: Callable[[object], None]) -> None:
    """Two steps of a rank of two replicas; sends the second's loss, the gradients of both, and the buffers."""
    rendezvous.join(timeout=60)
    number, (inputs, targets) = rendezvous.rank(), vectors(11)
    for schedule, checkpoint in CASES:
        settings = settings_to_train(schedule, 2, 2, 11, 1, precision=FP64, dp=2, checkpoint=checkpoint)
        plan = make_plan(settings, model(), TensorSpec.of(inputs), CPU)
        group = DistributedGroup(number, 4, tied=[], backend="gloo", timeout=60, dp=2)
        transport = open_transport(plan, group, CPU, backend="gloo", timeout=60)
        where = replace(placement(), syncs_batch_norm=True)
        rank = Rank(number, plan, model(), where, transport, OptimizerSettings(), add=partial(group.add, number))
        ranks = Ranks(plan, [rank], model().loss, group)
        for step in range(2):
            (result,) = ranks.train(ranks.cut(step, inputs[ranks.samples], targets))
        gradients = {name: p.grad for name, p in rank.parameters.items()}
        loss = None if result.loss is None else result.loss.item()
        send(((schedule, checkpoint), number, loss, gradients, buffers_of(list(rank.stages.values()))))
    rendezvous.leave()
