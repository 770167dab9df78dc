"""What actions and transfers take: the times a simulation runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.schedule.actions import Action, ActionType

Times = float | tuple[float, ...]
"""One time for every stage, or one entry a stage."""


class CostModel(Protocol):
    """Anything that knows how long things take, in any one unit."""

    def duration(self, action: Action) -> float:
        """How long a compute action keeps its rank busy."""
        ...

    def transfer_time(self, source_stage: int, destination_stage: int) -> float:
        """How long a message between two ranks is under way."""
        ...


@dataclass(frozen=True)
class Costs:
    """Times of a stage's actions and the latency of a message, in any one unit. `recompute=None`: as the forward."""

    forward: Times = 1.0
    backward: Times = 2.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    recompute: Times | None = None
    transfer: Times = 0.0
    """Latency of a message; of a tuple, the entry of the stage that sends."""

    def duration(self, action: Action) -> float:
        """How long `action` takes; ValueError for a send or receive, which takes its rank no time."""
        return _at(self._times(action), action.stage)

    def transfer_time(self, source_stage: int, destination_stage: int) -> float:
        """How long a message from one stage to its neighbor takes."""
        return _at(self.transfer, source_stage)

    def _times(self, action: Action) -> Times:
        match action.type:
            case ActionType.F:
                return self.forward
            case ActionType.B:
                return self.backward
            case ActionType.I:
                return self.backward_input
            case ActionType.W:
                return self.backward_weight
            case ActionType.R:
                return self.forward if self.recompute is None else self.recompute
        raise ValueError(f"{action} has no duration: use transfer_time for sends and receives")


def nominal_costs(stages_per_rank: int) -> Costs:
    """F=1, B=2, I=W=1 for a rank's whole share of the model, spread over its stages; R=F, no transfer time."""
    return Costs(
        forward=1 / stages_per_rank,
        backward=2 / stages_per_rank,
        backward_input=1 / stages_per_rank,
        backward_weight=1 / stages_per_rank,
    )


def _at(times: Times, stage: int) -> float:
    return times[stage] if isinstance(times, tuple) else times
