"""The rows of a comparison of runs: repeats drawn together, each against the baseline of its problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pipeline.report.naming import differing_settings, group_repeats, identity, row_names, value_text
from pipeline.report.ratio import Ratio, geometric_mean, ratio
from pipeline.report.runs import Run
from pipeline.report.target_loss import Target, choose_target
from pipeline.schedule.idle import CAUSES


@dataclass(frozen=True)
class Row:
    """What the repeats of one run measured: of the finished ones alone. Seconds, bytes and shares of 1; None: unknown.

    Rates are geometric means, so that quotients of rows are the ratios; times and bubbles are medians, memory the most
    that any repeat took. `reason` says what became of the repeats that did not finish.
    """

    number: int
    name: str
    settings: Mapping[str, str]
    runs: tuple[Run, ...]
    status: str
    reason: str
    samples_per_second: float | None
    step_seconds: float | None
    step_quartiles: tuple[float, float] | None
    bubble_measured: float | None
    bubble_predicted: float | None
    """From the costs profiled in the run, else the nominal ones."""
    bubble_span_measured: float | None
    bubble_span_predicted: float | None
    idle_measured: Mapping[str, float]
    """Seconds by cause, all ranks together, in a typical step."""
    idle_predicted: Mapping[str, float]
    peak_memory: tuple[float | None, ...]
    """Bytes, an entry a rank."""
    peak_activations: tuple[float | None, ...]
    training_loss: float | None
    validation_loss: float | None
    target: Target | None = None
    steps_to_target: float | None = None
    seconds_to_target: float | None = None
    is_baseline: bool = False
    ratio: Ratio | None = None
    """Samples/s over those of the baseline."""

    @property
    def finished(self) -> tuple[Run, ...]:
        """The repeats that count."""
        return tuple(run for run in self.runs if run.finished)


def compare_runs(runs: Sequence[Run], *, baseline: str | None = None, target_loss: float | None = None) -> list[Row]:
    """A row for each run and its repeats, in their order.

    A ratio, and a target loss, is one of equal problems: of runs of another model or data set the baseline is the row
    most like the chosen one, and the target their own.

    Args:
        runs: as `read_runs` finds them.
        baseline: a row's name or its number, counted from 1; None: the first that has a finished run.
        target_loss: None: the worst that a finished run ends with.

    Raises:
        ValueError: no row, or several, answer to `baseline`.
    """
    groups = group_repeats(runs)
    differing = differing_settings(groups)
    named = zip(groups, differing, row_names(groups, differing), strict=True)
    rows = [_measure(number, *each) for number, each in enumerate(named, 1)]
    chosen = _chosen(rows, baseline)
    problems: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        problems.setdefault(_problem(row.runs[0]), []).append(row)
    compared = [row for alike in problems.values() for row in _compare(alike, chosen, target_loss)]
    return sorted(compared, key=lambda row: row.number)


def _compare(rows: Sequence[Row], chosen: Row | None, target_loss: float | None) -> list[Row]:
    """The rows of one problem, each against their baseline and on its way to their target."""
    baseline = _likest(rows, chosen)
    target = choose_target([run for row in rows for run in row.runs], target_loss)
    return [_against(row, baseline, target) for row in rows]


def _measure(number: int, runs: tuple[Run, ...], settings: Mapping[str, str], name: str) -> Row:
    finished = [run for run in runs if run.finished]
    rates = _known(run.number("samples_per_second") for run in finished)
    quartiles = [run.step_quartiles for run in finished if run.step_quartiles is not None]
    profiled = [run.summary.get("profiled") or {} for run in finished]
    from_profile = _known(each.get("bubble_makespan") for each in profiled if isinstance(each, dict))
    return Row(
        number=number,
        name=name,
        settings=settings,
        runs=runs,
        status=_status(runs),
        reason="; ".join(dict.fromkeys(f"{run.status}: {run.reason}".rstrip(": ") for run in runs if not run.finished)),
        samples_per_second=geometric_mean(rates) if rates and min(rates) > 0 else None,
        step_seconds=_middle(finished, "step_seconds"),
        step_quartiles=(median(q[0] for q in quartiles), median(q[1] for q in quartiles)) if quartiles else None,
        bubble_measured=_middle(finished, "bubble_measured"),
        bubble_predicted=median(from_profile) if from_profile else _middle(finished, "bubble_predicted"),
        bubble_span_measured=_middle(finished, "bubble_span_measured"),
        bubble_span_predicted=_middle(finished, "bubble_span_predicted"),
        idle_measured=_idle(finished, "measured"),
        idle_predicted=_idle(finished, "predicted"),
        peak_memory=_peaks(finished, "peak_memory_bytes"),
        peak_activations=_peaks(finished, "peak_activation_bytes"),
        training_loss=_middle(finished, "train_loss"),
        validation_loss=_middle(finished, "validation_loss"),
    )


def _status(runs: Sequence[Run]) -> str:
    """The status they share, else how many finished."""
    if len({run.status for run in runs}) == 1:
        return runs[0].status
    return f"{sum(run.finished for run in runs)} of {len(runs)} finished"


def _middle(runs: Sequence[Run], name: str) -> float | None:
    values = _known(run.number(name) for run in runs)
    return median(values) if values else None


def _idle(runs: Sequence[Run], kind: str) -> dict[str, float]:
    found = [idle for run in runs if (idle := run.idle(kind))]
    return {cause: median(idle.get(cause, 0.0) for idle in found) for cause in CAUSES} if found else {}


def _peaks(runs: Sequence[Run], name: str) -> tuple[float | None, ...]:
    by_run = [run.ranks(name) for run in runs]
    ranks = max(map(len, by_run), default=0)
    known = [_known(peaks[rank] for peaks in by_run if rank < len(peaks)) for rank in range(ranks)]
    return tuple(max(peaks) if peaks else None for peaks in known)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _chosen(rows: Sequence[Row], baseline: str | None) -> Row | None:
    """The row that the user means; None where nothing was said and nothing finished."""
    if baseline is None:
        return next((row for row in rows if row.finished), None)
    words = set(baseline.split())
    tests: list[Callable[[Row], bool]] = [
        lambda row: row.name == baseline or str(row.number) == baseline,
        lambda row: words <= set(row.name.split()),
    ]
    for fits in tests:
        found = [row for row in rows if fits(row)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"--baseline {baseline} may be {_list(found)}: name one of them")
    raise ValueError(f"--baseline {baseline} names no row: use {_list(rows)}")


def _list(rows: Sequence[Row]) -> str:
    return " or ".join(f"{row.number} ({row.name})" for row in rows)


def _problem(run: Run) -> tuple[str, ...]:
    """The model and the data: only runs of the same have losses and rates to compare."""
    settings = identity(run)
    names = [name for name in settings if name.partition(".")[0] in ("model", "data")]
    return tuple(f"{name}={value_text(settings[name])}" for name in sorted(names))


def _likest(rows: Sequence[Row], chosen: Row | None) -> Row | None:
    """The baseline of one problem's rows: the chosen one, or the finished one that shares most of its settings."""
    if any(row is chosen for row in rows):
        return chosen
    finished = [row for row in rows if row.finished]
    if chosen is None or not finished:
        return None
    wanted = chosen.settings.items()
    return max(finished, key=lambda row: len(wanted & row.settings.items()))


def _against(row: Row, baseline: Row | None, target: Target | None) -> Row:
    reached = [target.reached(run) for run in row.finished] if target else []
    points = [point for point in reached if point is not None]
    all_reached = points and len(points) == len(reached)
    return replace(
        row,
        target=target,
        steps_to_target=median(point.step for point in points) if all_reached else None,
        seconds_to_target=median(point.seconds for point in points) if all_reached else None,
        is_baseline=row is baseline,
        ratio=None if baseline is None or row is baseline else _ratio(row, baseline),
    )


def _ratio(row: Row, baseline: Row) -> Ratio | None:
    ours, theirs = (_rated(each.finished) for each in (row, baseline))
    if not ours or not theirs:
        return None
    paired = _interleaved(ours, theirs)
    rates = ([run.number("samples_per_second") or 0.0 for run in runs] for runs in (ours, theirs))
    return ratio(*rates, paired=paired)


def _rated(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if (run.number("samples_per_second") or 0.0) > 0]


def _interleaved(ours: Sequence[Run], theirs: Sequence[Run]) -> bool:
    """Whether their repeats took turns, A B A B: in one sweep, one of each before the next of either."""
    jobs = [(run.job, side) for side, runs in enumerate((ours, theirs)) for run in runs]
    sweeps = {run.directory.parent for run in (*ours, *theirs)}
    if len(ours) != len(theirs) or len(sweeps) > 1 or any(job is None for job, _ in jobs):
        return False
    sides = [side for _, side in sorted(jobs)]
    return all({*pair} == {0, 1} for pair in zip(sides[::2], sides[1::2], strict=True))
