"""Which passes of a schedule are recomputed, and where: the action R.

A pass is one microbatch's way through one stage. A recomputed one keeps little from its F to its R, which rebuilds the
rest before the gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.costs import at_stage
from pipeline.schedule.memory import Footprint
from pipeline.schedule.schedule import Row, Schedule

Chooser = Callable[[int, int], bool]
"""Whether the pass (stage, microbatch) is recomputed."""


@dataclass(frozen=True)
class Window:
    """Recompute no more than a rank has no room for.

    At each action a rank holds of every pass what `footprint` says: `activation` from F to B or I where it is kept,
    `checkpoint` from F to R and `activation` from R where it is recomputed, and `weight_gradient` from I to W. The sum
    is at most `limit`. By default the footprint is one a pass, and the limit a number of passes.
    """

    limit: float | tuple[float, ...]
    """One number for every rank, or an entry a rank."""
    footprint: Footprint = field(default_factory=lambda: Footprint(1.0))

    def of_rank(self, rank: int) -> float:
        """The limit of one rank."""
        return self.limit[rank] if isinstance(self.limit, tuple) else self.limit


def recomputed(schedule: Schedule, mode: str | Window) -> Chooser:
    """What `mode` recomputes of a schedule.

    Args:
        mode: never; except_last (all microbatches but the last, as in GPipe); always; selective (all, and an R is a
            part of its forward); or a window.

    Raises:
        ValueError: another word, or a limit that can't be met, or isn't there for every rank.
    """
    if isinstance(mode, Window):
        return _beyond(schedule, mode)
    last = schedule.microbatches - 1
    rules: dict[str, Chooser] = {
        "never": lambda stage, microbatch: False,
        "except_last": lambda stage, microbatch: microbatch != last,
        "always": lambda stage, microbatch: True,
        "selective": lambda stage, microbatch: True,
    }
    if mode not in rules:
        raise ValueError(f"activation_checkpoint is {mode!r}: use one of {', '.join(rules)}, or a Window")
    return rules[mode]


def place_recomputation(schedule: Schedule, chosen: Chooser) -> Schedule:
    """Put an R directly before each backward (B or I) of which `chosen(stage, microbatch)` holds and that has none.

    R needs no gradient: it runs while the gradient is still on its way, and the backward waits.
    """

    placed = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.type is ActionType.R}

    def with_recomputation(row: Iterable[Action]) -> Iterator[Action]:
        for action in row:
            for part in action.compute:
                wanted = (part.stage, part.microbatch) not in placed and chosen(part.stage, part.microbatch)
                if part.type.is_backward and wanted:
                    yield Action(part.stage, ActionType.R, part.microbatch)
            yield action

    return schedule.with_rows(with_recomputation(row) for row in schedule.rows)


def _beyond(schedule: Schedule, window: Window) -> Chooser:
    if isinstance(window.limit, tuple) and len(window.limit) != schedule.pp:
        raise ValueError(f"the window has {len(window.limit)} limits for {schedule.pp} ranks: use one a rank")
    if schedule.forward_only:
        return lambda stage, microbatch: False
    lives = [_lives(row, window.footprint) for row in schedule.rows]
    least = [_sums(each.values(), len(row)) for each, row in zip(lives, schedule.rows, strict=True)]
    _check_room(least, window)
    dropped = frozenset(
        one for rank, sums in enumerate(least) for one in _dropped(lives[rank], sums, window.of_rank(rank))
    )
    return lambda stage, microbatch: (stage, microbatch) in dropped


def _check_room(least: Sequence[Sequence[float]], window: Window) -> None:
    peaks = {rank: max(sums) for rank, sums in enumerate(least) if max(sums) > _roomy(window.of_rank(rank))}
    if peaks:
        worst = max(peaks, key=peaks.__getitem__)
        needed = f"{peaks[worst]:,.0f}" if peaks[worst] >= 1 else f"{peaks[worst]:g}"
        raise ValueError(f"rank {worst} needs {needed} even with all its microbatches recomputed: use that or more")


@dataclass
class _Life:
    """One pass in a row: positions of its actions, and what it weighs between them."""

    forward: int
    rebuilt: int
    """Where its R is or would be: its own position, or that of the B or I that it is put before."""
    backward: int
    end: int
    whole: float
    checkpoint: float
    for_weight: float
    """From `backward` to `end`."""

    def least(self) -> Iterator[tuple[int, float]]:
        """What it weighs when it is recomputed: changes of the sum, from these positions on."""
        yield self.forward, self.checkpoint
        yield self.rebuilt, self.whole - self.checkpoint
        yield self.backward + 1, self.for_weight - self.whole
        yield self.end + 1, -self.for_weight

    @property
    def extra(self) -> float:
        """What it weighs more from F to R when it is kept."""
        return self.whole - self.checkpoint


def _dropped(lives: Mapping[tuple[int, int], _Life], least: Sequence[float], limit: float) -> Iterator[tuple[int, int]]:
    """The fewest passes of a rank whose recomputation keeps it within its limit (where all of them weigh the same).

    Whatever is kept, each pass weighs what a recomputed one does, `least` in all; on top of that comes, from F to R,
    what a kept one weighs more. Along the row, whenever the sum is over the limit, the one that would stay longest is
    dropped: whoever is dropped instead leaves no more room later (interval scheduling on k machines).
    """
    optional = {life.forward: one for one, life in lives.items() if life.rebuilt == life.backward}
    kept: list[tuple[int, int]] = []
    for position, base in enumerate(least):
        kept = [one for one in kept if lives[one].rebuilt > position]
        kept += [optional[position]] if position in optional else []
        while kept and base + sum(lives[one].extra for one in kept) > _roomy(limit):
            longest = max(kept, key=lambda one: (lives[one].rebuilt, lives[one].extra))
            kept.remove(longest)
            yield longest


_ROUNDING = 1e-9
"""Sums of bytes that are no whole numbers may come out this much larger than they are."""


def _roomy(limit: float) -> float:
    return limit * (1 + _ROUNDING)


def _lives(row: Row, footprint: Footprint) -> dict[tuple[int, int], _Life]:
    at = {
        (part.type, part.stage, part.microbatch): position
        for position, action in enumerate(row)
        for part in action.compute
    }
    lives = {}
    for (kind, stage, microbatch), position in at.items():
        if kind is not ActionType.F:
            continue
        backward = at.get((ActionType.B, stage, microbatch), at.get((ActionType.I, stage, microbatch)))
        if backward is None:
            continue  # an incomplete schedule, which the validator names
        whole = at_stage(footprint.activation, stage)
        left = whole if footprint.weight_gradient is None else at_stage(footprint.weight_gradient, stage)
        end = at.get((ActionType.W, stage, microbatch))
        lives[stage, microbatch] = _Life(
            forward=position,
            rebuilt=at.get((ActionType.R, stage, microbatch), backward),
            backward=backward,
            end=backward if end is None else end,
            whole=whole,
            checkpoint=at_stage(footprint.checkpoint, stage),
            for_weight=0.0 if end is None else left,
        )
    return lives


def _sums(lives: Iterable[_Life], positions: int) -> list[float]:
    """What all passes weigh at each position when they are recomputed."""
    changes = [0.0] * (positions + 1)
    for life in lives:
        for position, change in life.least():
            changes[position] += change
    total, sums = 0.0, []
    for change in changes[:-1]:
        total += change
        sums.append(total)
    return sums
