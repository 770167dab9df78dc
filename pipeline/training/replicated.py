"""One rank of several replicas of a pipeline: what it must have equal to its like in the others."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.engine.reduction import Add, Reducer, Replicas
from pipeline.engine.replica_buffers import ReplicaBuffers
from pipeline.engine.stage import Stage
from pipeline.engine.synced_batch_norm import synchronize
from pipeline.training.plan import Plan


class Replicated:
    """A rank's gradients, and the buffers that its forwards move.

    Not the gradients of parameters tied over ranks: they are summed once, over the ranks and the replicas together.

    Args:
        rank: of all replicas' ranks.
        stages: the rank's.
        add: sums over the replicas.
    """

    def __init__(self, rank: int, plan: Plan, stages: Mapping[int, Stage], add: Add) -> None:
        replica, row = divmod(rank, plan.schedule.pp)
        apart = plan.tied_ranks()
        parameters = {
            index: [p for name, p in stage.named_parameters() if plan.tied.get(name, name) not in apart]
            for index, stage in stages.items()
        }
        self.reducer = Reducer(plan.program.rows[row], parameters, add)
        modules = [module for stage in stages.values() for module in stage.modules]
        replicas = Replicas(replica, plan.dp, add)
        if any(stage.placement.syncs_batch_norm for stage in stages.values()):
            synchronize(modules, replicas)
        self.buffers = ReplicaBuffers(modules, replicas)

    def begin_step(self) -> None:
        """Forget what an abandoned step left."""
        self.reducer.begin_step()
        self.buffers.begin_step()
