"""How long a step should take by the costs that the run itself shows: the simulator against the run.

Costs are profiled where they count: in steps of the run, in every rank's process, while all of them work and share the
machine. An action never takes the same time twice, and a rank that waits for two others waits for the slower
one, so simulating averages would promise too much: a step is simulated many times, each time with durations drawn from
those of one profiled step, and what is predicted is the median, as what is measured is. Drawn from one step, because
what holds a step up mostly holds up all of it: such steps are then as rare among the simulated as among the others.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.idle import outputs, remote_inputs
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.simulate import Event, simulate
from pipeline.training.messages import Prediction
from pipeline.training.step_statistics import Rows, busy, makespan, summarize

PREDICTED_AFTER = 22
"""Steps after which a run is predicted for the first time; it is again at its end."""

_WARMUP_STEPS, _PROFILED_STEPS = 2, 20
_SIMULATED_STEPS, _SIMULATED_ACTIONS = 40, 20_000
"""How many steps are simulated, and how many actions in all, where that is fewer: training waits meanwhile."""

T = TypeVar("T")
Kind = tuple[tuple[ActionType, int, int], ...]
"""What costs the same: type, stage and samples of an action, or of a pair's two."""


def profiled_steps(steps: int, kept: int) -> list[int]:
    """Which steps, counted from 0, costs are profiled in after so many, of which the last `kept` are known.

    At most twenty, spread evenly, for a machine's speed changes over minutes; never two in a row, so that there are
    others to hold the prediction against; and not the first two, which allocate and warm up, but in a run of one or two
    the last.
    """
    candidates = range(max(min(_WARMUP_STEPS, steps - 1), steps - kept), steps, 2)
    return spread(candidates, _PROFILED_STEPS)


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of `items`, evenly spread."""
    count = min(len(items), most)
    return [items[len(items) * index // count] for index in range(count)]


@dataclass(frozen=True)
class Profile:
    """What steps of a program took, in seconds."""

    program: Schedule
    sizes: tuple[int, ...]
    """Samples in each microbatch."""
    durations: tuple[Mapping[Kind, tuple[float, ...]], ...]
    """All that were measured, step by step."""
    overhead: tuple[float, ...]
    """By rank: the median time between two actions that nothing keeps apart."""
    latency: Mapping[tuple[int, int], float]
    """By source and destination stage: the median time from the end of the action that makes a message to the start of
    the one that waits for it."""

    @classmethod
    def of(cls, steps: Sequence[Rows], program: Schedule, sizes: tuple[int, ...]) -> Profile:
        """Profile `steps`, each with the rows of all ranks."""
        gaps = [gap for step in steps for gap in _gaps(step, program)]
        latency = _latencies(gaps)
        durations = tuple(_durations(step, sizes) for step in steps)
        return cls(program, sizes, durations, _overheads(gaps, latency, program.pp), latency)

    def simulate(self, steps: int) -> list[Rows]:
        """What `steps` steps with these costs would do, always the same."""
        source = random.Random(0)
        profiled = [self.durations[len(self.durations) * at // steps] for at in range(steps)]
        drawn = [_Drawn(self, durations, source) for durations in profiled]
        return [self._without_overhead(simulate(self.program, costs).events) for costs in drawn]

    def costs(self) -> dict[str, object]:
        """The medians in the words of the configuration's `costs`, an entry a stage (None: what didn't run)."""
        names = {
            "forward": ActionType.F,
            "backward": ActionType.B,
            "backward_input": ActionType.I,
            "backward_weight": ActionType.W,
            "recompute": ActionType.R,
            "overlap": ActionType.OVERLAP_F_B,
        }
        costs: dict[str, object] = {name: self._by_stage(kind) for name, kind in names.items()}
        sends = [[s for (source, _), s in self.latency.items() if source == stage] for stage in self._stages]
        costs["transfer"] = [statistics.fmean(seconds) if seconds else 0.0 for seconds in sends]
        return costs

    @property
    def _stages(self) -> range:
        return range(self.program.stages)

    def _by_stage(self, wanted: ActionType) -> list[float | None] | None:
        found: list[float | None] = []
        for stage in self._stages:
            seconds = [
                duration
                for step in self.durations
                for name, durations in step.items()
                if _type(name) is wanted and name[0][1] == stage
                for duration in durations
            ]
            found.append(statistics.median(seconds) if seconds else None)
        return found if any(seconds is not None for seconds in found) else None

    def _without_overhead(self, events: Rows) -> Rows:
        return tuple(
            tuple(Event(rank, event.action, event.start, event.end - self.overhead[rank]) for event in row)
            for rank, row in enumerate(events)
        )


class _Drawn:
    """The costs of one simulated step. A rank is kept by an action and by the engine's own time after it."""

    def __init__(self, profile: Profile, durations: Mapping[Kind, tuple[float, ...]], source: random.Random) -> None:
        self._profile = profile
        self._durations = durations
        self._source = source

    def duration(self, action: Action) -> float:
        """Seconds, as some action of the kind took."""
        profile = self._profile
        measured = self._durations.get(kind(action, profile.sizes))
        if measured is None:  # a forward that runs in pairs alone: its half
            (own,) = kind(action, profile.sizes)
            pairs = [seconds for name, seconds in self._durations.items() if name[0] == own]
            measured = tuple(duration / 2 for durations in pairs for duration in durations)
        return self._source.choice(measured) + profile.overhead[profile.program.stage_to_rank[action.stage]]

    def transfer_time(self, source_stage: int, destination_stage: int) -> float:
        """Seconds, of which the sender's overhead is counted already."""
        profile = self._profile
        latency = profile.latency.get((source_stage, destination_stage), 0.0)
        return max(0.0, latency - profile.overhead[profile.program.stage_to_rank[source_stage]])


def predict(
    profiles: Sequence[Profile],
    profiled: Sequence[int],
    seconds: Sequence[float],
    steps: Sequence[Rows],
    *,
    turns: bool,
) -> Prediction:
    """Predict a step.

    Args:
        profiles: of `steps`, one of each replica.
        profiled: which those are, counted from 0.
        seconds: what each of them took in all.
        steps: their events, of all replicas.
        turns: the ranks share a process and take turns, so that a step takes the sum of their work.
    """
    length = busy if turns else makespan
    outside = statistics.median(whole - length(step) for whole, step in zip(seconds, steps, strict=True))
    actions = sum(map(len, steps[0]))
    count = max(1, min(_SIMULATED_STEPS, _SIMULATED_ACTIONS // actions))
    replicas = zip(*(profile.simulate(count) for profile in profiles), strict=True)
    simulated = [_numbered(row for rows in step for row in rows) for step in replicas]
    common = summarize(simulated, profiles[0].program)
    return Prediction(
        steps=tuple(step + 1 for step in profiled),
        step_seconds=statistics.median(map(length, simulated)) + outside,
        outside_seconds=outside,
        bubble=common.bubble,
        bubble_span=common.bubble_span,
        idle=common.idle,
        events=common.events,
        costs=profiles[0].costs(),
    )


def _numbered(rows: Iterable[Sequence[Event]]) -> Rows:
    return tuple(
        tuple(Event(rank, event.action, event.start, event.end) for event in row) for rank, row in enumerate(rows)
    )


def kind(action: Action, sizes: Sequence[int]) -> Kind:
    """What `action` costs as much as."""
    return tuple((part.type, part.stage, sizes[part.microbatch]) for part in action.compute)


def _durations(step: Rows, sizes: Sequence[int]) -> dict[Kind, tuple[float, ...]]:
    found: dict[Kind, list[float]] = defaultdict(list)
    for row in step:
        for event in row:
            found[kind(event.action, sizes)].append(event.end - event.start)
    return {name: tuple(seconds) for name, seconds in found.items()}


def _type(name: Kind) -> ActionType:
    return name[0][0] if len(name) == 1 else ActionType.OVERLAP_F_B


@dataclass(frozen=True, slots=True)
class _Gap:
    """What lies before an action."""

    rank: int
    seconds: float | None
    """Since the rank's last action; None before its first."""
    channel: tuple[int, int] | None
    """Of the input that was sent last; None where all are the rank's own."""
    since_sent: float
    """Seconds since that input was sent."""

    @property
    def waited(self) -> bool:
        """The rank had nothing to do already when the input was sent."""
        return self.channel is not None and (self.seconds is None or self.since_sent < self.seconds)


def _gaps(step: Rows, program: Schedule) -> list[_Gap]:
    made = outputs([event for row in step for event in row], program)
    gaps = []
    for rank, row in enumerate(step):
        for earlier, later in pairwise((None, *row)):
            assert later is not None
            inputs = [(made[needed].sent, needed) for needed in remote_inputs(later.action, program)]
            sent, last = max(inputs, default=(0.0, None))
            channel = None if last is None else (last.source_stage, last.destination_stage)
            gaps.append(_Gap(rank, None if earlier is None else later.start - earlier.end, channel, later.start - sent))
    return gaps


def _latencies(gaps: Sequence[_Gap]) -> dict[tuple[int, int], float]:
    """From the messages that were waited for; a channel where none was is like the others, as far as can be told."""
    waited: dict[tuple[int, int], list[float]] = defaultdict(list)
    bound: dict[tuple[int, int], float] = {}
    for gap in gaps:
        if gap.channel is not None:
            bound[gap.channel] = min(gap.since_sent, bound.get(gap.channel, gap.since_sent))
            if gap.waited:
                waited[gap.channel].append(gap.since_sent)
    known = {channel: statistics.median(seconds) for channel, seconds in waited.items()}
    usual = statistics.median(known.values()) if known else 0.0
    return {channel: max(0.0, known.get(channel, min(usual, fastest))) for channel, fastest in bound.items()}


def _overheads(gaps: Sequence[_Gap], latency: Mapping[tuple[int, int], float], ranks: int) -> tuple[float, ...]:
    """From the gaps before actions whose inputs were there."""
    free: list[list[float]] = [[] for _ in range(ranks)]
    for gap in gaps:
        arrived = gap.channel is None or gap.since_sent - (gap.seconds or 0.0) > latency[gap.channel]
        if gap.seconds is not None and arrived:
            free[gap.rank].append(gap.seconds)
    return tuple(max(0.0, statistics.median(seconds)) if seconds else 0.0 for seconds in free)
