"""What the ranks of test_distributed.py run, importable so that it can be pickled by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from models.model import Model
from pipeline.engine.boundary import TensorSpec, specs_of
from pipeline.engine.buffers import BufferPool
from pipeline.engine.distributed import DistributedTransport, open_channels
from pipeline.engine.executor import run
from pipeline.engine.shared_memory import SharedMemoryTransport
from pipeline.engine.transport import PeerError
from pipeline.schedule.schedule import Channel
from pipeline.training import rendezvous
from pipeline.training.gradients import sum_tied_gradients
from pipeline.training.group import DistributedGroup
from pipeline.training.plan import make_plan
from pipeline.training.precision import autocast, parameter_dtype
from pipeline.training.rank import Rank
from pipeline.training.settings import OptimizerSettings, PrecisionSettings
from pipeline.training.transports import open_transport
from tests.engine.harness import CPU, buffers_of, microbatches_of, placement, settings_for
from tests.engine.samples import (
    chain,
    images,
    linears,
    nested,
    nests,
    sentences,
    small_gpt,
    text,
    texts,
    translator,
    vectors,
)

WIDE = 1 << 20
"""32 MB in four samples of float64: far over what any transport buffers without a matching receive."""
FP64 = PrecisionSettings("fp64", "float64", None)
BF16 = PrecisionSettings("bf16", "float32", "bfloat16")


class Scale(nn.Module):
    """One number a column: large messages at the price of an addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True)
class First:
    """The first column summed."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].sum()

    def weight(self, targets: Tensor) -> int:
        return len(targets)


@dataclass(frozen=True)
class Case:
    """One step of one model under one schedule."""

    name: str
    schedule: str
    microbatches: int
    batch_size: int
    checkpoint: str = "never"
    precision: PrecisionSettings = field(default_factory=lambda: FP64)

    def model_and_batch(self) -> tuple[Model, tuple[Tensor, Tensor]]:
        if self.name.startswith("resnet"):
            from models.resnet import resnet  # not at the top: it takes torchvision, which most ranks don't need

            return resnet(depth=18, classes=10), images(self.batch_size)
        if self.name.startswith("nests"):
            return nested(), nests(self.batch_size)
        if self.name.startswith("lengths"):
            return small_gpt(), texts([8, 3, 5, 3])
        if self.name.startswith("short"):
            return small_gpt(), text(3)
        if self.name.startswith("translator"):
            return translator(), sentences(self.batch_size)
        if self.name.startswith("large"):
            return chain([partial(Scale, WIDE)] * 2, loss=First()), vectors(self.batch_size, WIDE)
        return small_gpt(dropout=0.1 if "dropout" in self.name else 0.0), text(self.batch_size)


def steps(work: tuple[str, Sequence[Case]], send: Callable[[object], None]) -> None:
    """Run every case's step over the transport chosen and send each rank's loss, gradients and buffers."""
    choice, cases = work
    rendezvous.join(timeout=60)
    for case in cases:
        send((case.name, *one_step(case, choice)))
    rendezvous.leave()


def one_step(case: Case, choice: str) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
    model, (inputs, targets) = case.model_and_batch()
    settings = settings_for(
        case.schedule, 2, case.microbatches, case.batch_size, checkpoint=case.checkpoint, precision=case.precision
    )
    plan, number = make_plan(settings, model, specs_of(inputs), CPU), rendezvous.rank()
    group = DistributedGroup(number, 2, tied=list(plan.tied_ranks().values()), backend="gloo", timeout=60)
    transport = open_transport(plan, group, CPU, backend="gloo", timeout=60, choice=choice)
    assert isinstance(transport, SharedMemoryTransport if choice == "auto" else DistributedTransport)
    where = placement(parameter_dtype(case.precision), autocast=autocast(case.precision, "cpu"))
    rank = Rank(number, plan, model, where, transport, OptimizerSettings())
    (result,) = run([rank.trainer], [microbatches_of(plan, model, inputs, targets)])
    sum_tied_gradients({number: rank.parameters}, plan.tied, plan.tied_ranks(), group)
    gradients = {name: p.grad for name, p in rank.parameters.items() if p.grad is not None}
    return result.loss, gradients, buffers_of(list(rank.stages.values()))


def collectives(_: object, send: Callable[[object], None]) -> None:
    """What DistributedGroup gives each of three ranks, the tied parameter being on the outer two."""
    rendezvous.join(timeout=60)
    rank = rendezvous.rank()
    group = DistributedGroup(rank, 3, tied=[(0, 2)], backend="gloo", timeout=60)
    floats = group.gather_floats([rank + 0.1])
    objects = group.gather([{"rank": rank}])
    gradient = torch.full((2,), 10.0**rank)
    if rank != 1:
        group.sum_gradients((0, 2), {rank: gradient})
    store = rendezvous.shared_store()
    store.set(f"rank {rank} comes", "yes")
    group.meet()
    met = [store.check([f"rank {other} comes"]) for other in range(3)]
    group.meet()
    replicas = DistributedGroup(rank, 3, tied=[], backend="gloo", timeout=60, dp=3)
    sums = [replicas.add(rank, key, torch.tensor([key * 10.0**rank])) for key in (1, 2)]
    added = [wait().item() for wait in sums]
    send((rank, group.local, group.size, floats, objects, gradient.tolist(), met, added))
    rendezvous.leave()


def late_message(_: object, send: Callable[[object], None]) -> None:
    """Rank 1 waits a second for what rank 0 never sends."""
    rendezvous.join(timeout=60)
    rank, channel = rendezvous.rank(), Channel(0, 1, "activation")
    groups = open_channels([channel], rank, "gloo", 60)
    if rank == 1:
        transport = DistributedTransport(groups, CPU, "gloo", 1, BufferPool(8, 1))
        receive = transport.receive(channel, "a message", TensorSpec((2,), torch.float32))
        began = time.monotonic()
        try:
            receive.wait()
        except PeerError as error:
            send((str(error), time.monotonic() - began))
        rendezvous.shared_store().set("waited", "yes")
    rendezvous.shared_store().get("waited")


class BreaksOnRank1(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and rendezvous.rank() == 1:
            self.calls += 1
            if self.calls == 3:
                raise OverflowError("the third forward breaks")
        return super().forward(x)


def break_in_a_step(choice: str, send: Callable[[object], None]) -> None:
    """Rank 1 fails while rank 0 waits for its gradients."""
    rendezvous.join(timeout=600)
    try:
        inputs, targets = vectors(8)
        model = chain([linears(1).layers[0].build, partial(BreaksOnRank1, 4, 4)])
        plan = make_plan(settings_for("1f1b", 2, 8, 8, precision=FP64), model, TensorSpec.of(inputs), CPU)
        number = rendezvous.rank()
        group = DistributedGroup(number, 2, tied=[], backend="gloo", timeout=600)
        transport = open_transport(plan, group, CPU, backend="gloo", timeout=600, choice=choice)
        rank = Rank(number, plan, model, placement(), transport, OptimizerSettings())
        run([rank.trainer], [microbatches_of(plan, model, inputs, targets)])
    finally:
        rendezvous.leave()
