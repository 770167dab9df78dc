"""Who holds which layers, as the settings say, and why: what the plan prints of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf

from pipeline import partition
from pipeline.partition import LayerCosts, Problem
from pipeline.partition.problem import Counts, runs
from pipeline.schedule.costs import Costs
from pipeline.schedule.schedule import Schedule
from pipeline.training import rendezvous
from pipeline.training.checkpointing import lowered, parse_bytes, recomputed_part
from pipeline.training.progress import bytes_text
from pipeline.training.schedule_choice import stated_times, write_schedule
from pipeline.training.settings import Settings


@dataclass(frozen=True)
class Cut:
    """Which layers each stage holds, and why."""

    counts: Counts
    """How many consecutive layers, by stage."""
    why: str
    """What the plan says of it: one line."""


def simple_cut(settings: Settings, parameters: Mapping[str, int], stages: int) -> Cut:
    """A cut that needs no costs: uniform, by parameters or by hand.

    Args:
        parameters: how many each layer has, by its name, in the model's order.

    Raises:
        ValueError: the cut can't be, or it is one that needs costs (`searched_cut`).
    """
    chosen, sizes = settings.partition, list(parameters.values())
    if chosen.name == "manual":
        return _told("manual", partition.manual(chosen.layers, list(parameters), stages))
    if chosen.name == "uniform":
        return _told("uniform", partition.uniform(len(sizes), stages))
    if chosen.name != "parameters":
        raise ValueError(f"partition={chosen.name} needs what the layers cost: use uniform, parameters or manual here")
    counts = partition.bottleneck(sizes, stages)
    return _told("parameters", counts, "largest stage", lambda cut: f"{_largest(sizes, cut):,.0f} parameters")


def searched_cut(settings: Settings, layers: Sequence[LayerCosts], costs_of: Callable[[Counts], Costs | None]) -> Cut:
    """A cut by what the layers take (time), hold (memory) or both (auto), and by the schedule.

    The ranks of a launcher take rank 0's: how far a search gets depends on the machine.

    Args:
        layers: their costs; for partition=memory their bytes alone.
        costs_of: a cut's costs by stage, for a schedule that is searched for its costs; None: the stated ones.

    Raises:
        ValueError: the cut can't be, or see `check_search`.
    """
    check_search(settings, len(layers))

    def search() -> str:
        cut = SEARCHED[settings.partition.name](settings, layers, costs_of)
        return json.dumps(asdict(cut))

    # a process may prepare several runs, as in a sweep: what is agreed on is known by all that it depends on
    terms = hashlib.sha256(repr((settings, layers)).encode()).hexdigest()
    agreed = json.loads(rendezvous.agree(f"cut {terms}", search))
    return Cut(tuple(agreed["counts"]), agreed["why"])


def check_search(settings: Settings, layers: int) -> None:
    """Refuse what a search over the cuts of so many layers can't reckon with.

    Raises:
        ValueError: too few layers, a limit that is no size, messages that can't be or by stage, recomputation by bytes.
    """
    chosen, costs = settings.partition, settings.costs
    partition.uniform(layers, write_schedule(settings).stages)
    _memory_limit(settings)
    Costs(transfer=stated_times("costs.transfer", costs.transfer) or 0.0, bandwidth=costs.bandwidth)
    if isinstance(costs.transfer, list | tuple):
        raise ValueError(
            f"costs.transfer={list(costs.transfer)} has an entry a stage, and partition={chosen.name} still looks for "
            "the stages: use one number of seconds"
        )
    if settings.activation_checkpoint.memory_limit is not None:
        raise ValueError(
            f"activation_checkpoint.memory_limit={settings.activation_checkpoint.memory_limit} recomputes as the cut "
            f"needs it, and partition={chosen.name} needs to know it before: use "
            "activation_checkpoint.keep_microbatches=4"
        )


def _by_time(settings: Settings, layers: Sequence[LayerCosts], costs_of: Callable[[Counts], Costs | None]) -> Cut:
    latency, bandwidth = _messages(settings)
    cuts = [2 * (latency + layer.boundary_bytes / bandwidth) for layer in layers]
    seconds = [layer.seconds for layer in layers]
    counts = partition.bottleneck(seconds, write_schedule(settings).stages, cuts if any(cuts) else None)

    def slowest(cut: Counts) -> str:
        return seconds_text(max([_largest(seconds, cut), *(cuts[end - 1] for _, end in runs(cut[:-1]))]))

    return _told("time", counts, "slowest stage or message" if any(cuts) else "slowest stage", slowest)


def _by_memory(settings: Settings, layers: Sequence[LayerCosts], costs_of: Callable[[Counts], Costs | None]) -> Cut:
    problem = problem_of(settings, layers, write_schedule(settings))
    if not problem.knows_bytes:
        raise ValueError(
            "partition=memory: what the layers hold is not known, for they are compiled or can't run without memory; "
            "use partition=parameters"
        )
    found = partition.lightest(problem, settings.partition.search_seconds)
    proof = "lightest" if found.proven else _gap(found.peak_bytes, found.bound, settings)
    return _told(
        "memory", found.counts, "fullest rank", lambda cut: bytes_text(int(problem.peak_bytes(cut))), f", {proof}"
    )


def _by_makespan(settings: Settings, layers: Sequence[LayerCosts], costs_of: Callable[[Counts], Costs | None]) -> Cut:
    stages = write_schedule(settings).stages
    schedule = write_schedule(settings, costs_of(partition.uniform(len(layers), stages)))
    problem = problem_of(settings, layers, schedule)
    limit = _memory_limit(settings)
    found = partition.auto(problem, memory_limit=limit, search_seconds=settings.partition.search_seconds)
    proof = "proven smallest" if found.proven else _gap(found.makespan, found.bound, settings)
    final = write_schedule(settings, costs_of(found.counts))
    if final.rows != schedule.rows:  # zb_auto: searched anew for the costs of this cut
        problem, proof = problem_of(settings, layers, final), "for an order searched after the cut"
        _check_new_order(problem.peak_bytes(found.counts), limit)
    if limit < inf:
        proof += f", at most {bytes_text(int(problem.peak_bytes(found.counts)))} a rank"

    def makespan(cut: Counts) -> str:
        fits = problem.peak_bytes(cut) <= limit
        return seconds_text(problem.longest(cut).makespan) + ("" if fits else ", over the limit")

    return _told("auto", found.counts, "simulated makespan", makespan, f", {proof}")


def _check_new_order(held: float, limit: float) -> None:
    """Refuse an order that keeps less to the limit than the one that the cut was chosen for."""
    if held > limit:
        raise ValueError(
            f"partition.memory_limit={limit:.0f} bytes a rank: the order that zb_auto finds for the cut holds "
            f"{held:.0f}; use that, or keep fewer microbatches in flight, schedule.memory_cap=4"
        )


SEARCHED = {"time": _by_time, "memory": _by_memory, "auto": _by_makespan}


def problem_of(settings: Settings, layers: Sequence[LayerCosts], schedule: Schedule) -> Problem:
    """What a search over cuts is told of the run: the layers, the schedule with its recomputations, the messages."""
    part = recomputed_part(settings.activation_checkpoint)

    def repeated(count: int) -> list[bool]:
        return [one.recomputed for one in part.segments(count) for _ in range(count)[one.layers]]

    program = lowered(schedule, settings).compute_only()
    latency, bandwidth = _messages(settings)
    return Problem(layers, program, latency, bandwidth, repeated)


def _messages(settings: Settings) -> tuple[float, float]:
    """Latency and bandwidth as stated."""
    latency = stated_times("costs.transfer", settings.costs.transfer) or 0.0
    assert not isinstance(latency, tuple), "checked before"
    return latency, inf if settings.costs.bandwidth is None else settings.costs.bandwidth


def _memory_limit(settings: Settings) -> float:
    value = settings.partition.memory_limit
    limit = inf if value is None else parse_bytes(value)
    if limit is None:
        raise ValueError(f"partition.memory_limit={value} is not a size: use one such as 2GiB, 500MB or 1000000")
    return limit


def _told(
    name: str, counts: Counts, measure: str = "", figure: Callable[[Counts], str] | None = None, more: str = ""
) -> Cut:
    """With its line: the counts, how good that is, and how good equal counts would be."""
    line = f"{name}: {'+'.join(map(str, counts))} layers"
    if figure is None:
        return Cut(counts, line)
    equal = partition.uniform(sum(counts), len(counts))
    beside = "as uniform" if counts == equal else f"uniform: {figure(equal)}"
    return Cut(counts, f"{line}, {measure} {figure(counts)}{more} ({beside})")


def _gap(found: float, bound: float, settings: Settings) -> str:
    """What is said of a search that ran out of time."""
    above = f"at most {100 * (found / bound - 1):.1f} % above the best" if bound > 0 else "perhaps not the best"
    return f"{above} (partition.search_seconds={settings.partition.search_seconds:g})"


def _largest(sizes: Sequence[float], counts: Counts) -> float:
    return max(sum(sizes[start:end]) for start, end in runs(counts))


def seconds_text(seconds: float) -> str:
    """Seconds for people: 12.35 s, 41.2 ms, 4.12 ms, 0.412 ms."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2 if seconds >= 0.001 else 3}f} ms"
