"""What actions and transfers take: the times a simulation runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, Protocol

from pipeline.schedule.actions import Action, ActionType

Times = float | tuple[float, ...]
"""One time (or size) for every stage, or one entry a stage."""


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
    """Times of a stage's actions and of its messages, in any one unit. ValueError for one below 0."""

    forward: Times = 1.0
    backward: Times | None = None
    """Of a full backward. None: `backward_input` and `backward_weight` together."""
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    recompute: Times | None = None
    """None: as the forward."""
    overlap: Times | None = None
    """Of an overlapped pair; of a tuple, the entry of the stage that runs forward. None: its forward and backward."""
    transfer: Times = 0.0
    """Latency of a message; of a tuple, the entry of the stage that sends."""
    bandwidth: float | None = None
    """Bytes of a message that pass in a unit of time, on top of the latency. None: any number."""
    boundary_bytes: Times = 0.0
    """Size of a stage's output, and of the gradient that comes back for it."""

    def __post_init__(self) -> None:
        for name in (*_COMPUTE, "transfer", "boundary_bytes"):
            check_times(name, getattr(self, name), "costs")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"costs.bandwidth is {self.bandwidth}: use more than 0, or null for any")

    def duration(self, action: Action) -> float:
        """How long `action` takes; ValueError for a send, receive or reduction, which takes its rank no time."""
        match action.type:
            case ActionType.F:
                return at_stage(self.forward, action.stage)
            case ActionType.B if self.backward is not None:
                return at_stage(self.backward, action.stage)
            case ActionType.B:
                return at_stage(self.backward_input, action.stage) + at_stage(self.backward_weight, action.stage)
            case ActionType.I:
                return at_stage(self.backward_input, action.stage)
            case ActionType.W:
                return at_stage(self.backward_weight, action.stage)
            case ActionType.R:
                return at_stage(self.forward if self.recompute is None else self.recompute, action.stage)
            case ActionType.OVERLAP_F_B if self.overlap is not None:
                return at_stage(self.overlap, action.stage)
            case ActionType.OVERLAP_F_B:
                return sum(map(self.duration, action.parts))
        raise ValueError(f"{action} has no duration: use transfer_time for sends and receives")

    def transfer_time(self, source_stage: int, destination_stage: int) -> float:
        """How long a message from one stage to its neighbor takes: latency, and size over bandwidth."""
        latency = at_stage(self.transfer, source_stage)
        if self.bandwidth is None:
            return latency
        return latency + at_stage(self.boundary_bytes, min(source_stage, destination_stage)) / self.bandwidth


_COMPUTE = ("forward", "backward", "backward_input", "backward_weight", "recompute", "overlap")


def place_costs(costs: Costs, stage_to_rank: Sequence[int], per: Literal["stage", "rank"] = "stage") -> Costs:
    """`costs` for a placement, with an entry a stage.

    Args:
        costs: what a stage takes, or with `per` "rank" what a rank takes for all its stages together: then the actions'
            times are divided by the number of stages the rank holds. A tuple has an entry a stage, or per rank also one
            a rank. Messages are not divided: each stage's is as large as the one of the whole rank.
        stage_to_rank: the rank of each stage.

    Raises:
        ValueError: another number of entries, or another `per`.
    """
    if per not in ("stage", "rank"):
        raise ValueError(f"costs.per is {per!r}: use stage or rank")
    stages, ranks = len(stage_to_rank), max(stage_to_rank) + 1
    placed: dict[str, Times] = {}
    for name in (*_COMPUTE, "transfer", "boundary_bytes"):
        times: Times | None = getattr(costs, name)
        if times is None:
            continue
        divided = per == "rank" and name in _COMPUTE
        if isinstance(times, tuple) and divided and len(times) == ranks:
            times = tuple(times[rank] for rank in stage_to_rank)
        if isinstance(times, tuple) and len(times) != stages:
            raise ValueError(f"costs.{name} has {len(times)} entries for {stages} stages: use one number or {stages}")
        shares = [stage_to_rank.count(rank) if divided else 1 for rank in stage_to_rank]
        placed[name] = tuple(at_stage(times, stage) / share for stage, share in enumerate(shares))
    return replace(costs, **placed)  # type: ignore[arg-type]


def nominal_costs(stages_per_rank: int, recomputed: Times = 1.0) -> Costs:
    """F=1, B=2, I=W=1 for a rank's whole share of the model, spread over its stages; no transfer time.

    `recomputed` is R as a part of F.
    """
    share = 1 / stages_per_rank
    return Costs(
        forward=share,
        backward=2 * share,
        backward_input=share,
        backward_weight=share,
        recompute=tuple(share * part for part in recomputed) if isinstance(recomputed, tuple) else share * recomputed,
    )


def at_stage(times: Times, stage: int) -> float:
    """The entry of `stage`, or the one number there is."""
    return times[stage] if isinstance(times, tuple) else times


def check_times(name: str, times: Times | None, group: str) -> None:
    """ValueError unless every entry is a finite number of 0 or more."""
    for time in times if isinstance(times, tuple) else (times,):
        if time is not None and not 0 <= time < inf:
            raise ValueError(f"{group}.{name} is {time}: use 0 or more")
