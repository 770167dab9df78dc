"""Several plans side by side: which of them are of one equal model, and which of those no other beats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

Plan = Mapping[str, Any]
"""What a plan.json holds."""


@dataclass(frozen=True)
class Entry:
    """One plan, in the terms of a comparison: costs and bytes are a rank's share of one model."""

    label: str
    stages_per_rank: str
    makespan: float
    bubble_makespan: float
    bubble_span: float
    peak: float
    """In microbatches: microbatch x stage, divided by the stages a rank holds; counted to the end of B or W."""
    peak_released_at_input: float
    peak_bytes: float | None
    on_front: bool
    differs: str = ""
    """Why it cannot be compared with the others; empty where it can."""


@dataclass(frozen=True)
class Comparison:
    """Entries in order of makespan, the ones that cannot be compared last."""

    entries: tuple[Entry, ...]
    pp: int
    microbatches: int
    costs: Mapping[str, Any]
    unit: str

    @property
    def comparable(self) -> tuple[Entry, ...]:
        """The ones of the model that most are of."""
        return tuple(entry for entry in self.entries if not entry.differs)

    @property
    def in_bytes(self) -> bool:
        """Whether all that are compared know their bytes; the front is then one of bytes."""
        return all(entry.peak_bytes is not None for entry in self.comparable)

    def memory(self, entry: Entry) -> float:
        """What the front weighs against the makespan: bytes or microbatches."""
        return entry.peak_bytes if self.in_bytes and entry.peak_bytes is not None else entry.peak


def compare(rows: Sequence[Plan]) -> Comparison:
    """Compare plans. The model compared is the one most of them are of, the first of equals. ValueError for none."""
    if not rows:
        raise ValueError("there is no plan to compare: give the contents of one plan.json or more")
    alike = [sum(not _difference(other, row) for other in rows) for row in rows]
    reference = rows[alike.index(max(alike))]
    differences = [_difference(row, reference) for row in rows]
    compared = [row for row, differs in zip(rows, differences, strict=True) if not differs]
    front = pareto_front([_point(row, compared) for row in compared])
    on_front = {id(row) for row, best in zip(compared, front, strict=True) if best}
    labels = dict(zip(map(id, compared), _labels(compared), strict=True))
    named = zip(rows, differences, strict=True)
    entries = [_entry(row, labels.get(id(row), _name(row)), id(row) in on_front, differs) for row, differs in named]
    entries.sort(key=lambda entry: (bool(entry.differs), entry.makespan, entry.peak))
    costs = reference["comparison"]["costs"]
    return Comparison(tuple(entries), reference["pp"], reference["microbatches"], costs, reference["unit"])


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each (time, memory), whether no other takes less of one without more of the other. Equals share a place."""
    return [not any(_beats(other, point) for other in points) for point in points]


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    less = [a < b and not isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other, strict=True)]
    more = [a > b and not isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other, strict=True)]
    return any(less) and not any(more)


def _point(row: Plan, compared: Sequence[Plan]) -> tuple[float, float]:
    shares = [other["comparison"] for other in compared]
    memory = "peak_in_flight" if any(share["peak_bytes"] is None for share in shares) else "peak_bytes"
    return row["comparison"]["makespan"], row["comparison"][memory]


def _difference(row: Plan, reference: Plan) -> str:
    """What keeps a plan from being compared with another."""
    if row["pp"] != reference["pp"]:
        return f"pp={row['pp']}"
    if row["microbatches"] != reference["microbatches"]:
        return f"{row['microbatches']} microbatches"
    mine, theirs = row["comparison"]["costs"], reference["comparison"]["costs"]
    different = [name for name in theirs if not _equal(mine[name], theirs[name])]
    if row["unit"] != reference["unit"]:
        return f"another unit ({row['unit']})"
    return f"other costs ({', '.join(different)})" if different else ""


def _equal(one: Any, other: Any) -> bool:
    """Costs, one number or a list. Rounding, in sums over another number of stages, makes no difference."""
    if isinstance(one, list) or isinstance(other, list):
        same = isinstance(one, list) and isinstance(other, list) and len(one) == len(other)
        return same and all(map(_equal, one, other))
    return isclose(one, other, rel_tol=1e-9)


def _entry(row: Plan, label: str, on_front: bool, differs: str) -> Entry:
    share, stages = row["comparison"], row["stages_per_rank"]
    return Entry(
        label=label,
        stages_per_rank=str(stages) if isinstance(stages, int) else f"{min(stages)}-{max(stages)}",
        makespan=share["makespan"],
        bubble_makespan=share["bubble_makespan"],
        bubble_span=share["bubble_span"],
        peak=share["peak_in_flight"],
        peak_released_at_input=share["peak_in_flight_released_at_input"],
        peak_bytes=share["peak_bytes"],
        on_front=on_front,
        differs=differs,
    )


def _name(row: Plan) -> str:
    return str(row.get("label") or row["schedule"])


def _labels(rows: Sequence[Plan]) -> list[str]:
    """A plan's `label` or its schedule's name, with what tells plans of one name apart."""
    names = list(map(_name, rows))
    stages = [f"{name} v={row['stages_per_rank']}" for name, row in zip(names, rows, strict=True)]
    clear = [len({other for other, same in zip(stages, names, strict=True) if same == name}) == 1 for name in names]
    names = [name if single else longer for name, longer, single in zip(names, stages, clear, strict=True)]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} #{1 + names[:at].count(name)}" for at, name in enumerate(names)]
