"""Which settings tell runs apart: repeats are grouped, and groups named by what differs among them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from pipeline.report.runs import Run

_REPEAT = ("seed", "repeat")
"""Settings in which repeats of one run differ."""
_ASIDE = ("logger.group", "logger.mode", "logger.project", "logger.tags", "sweep", "sweep.")
"""Settings that change nothing of what is measured; with a dot at the end, all below."""
_BARE = ("schedule", "model", "experiment")
"""Settings whose value needs no name beside it."""


def group_repeats(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Runs that are equal in all settings but the repeat's number or seed, in the order of their first ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(identity(run), sort_keys=True, default=str), []).append(run)
    return [tuple(group) for group in groups.values()]


def identity(run: Run) -> dict[str, object]:
    """The settings that make a run what it is."""
    return {name: value for name, value in run.settings.items() if not _set_aside(name) and name not in _REPEAT}


def _set_aside(name: str) -> bool:
    return any(name.startswith(aside) if aside.endswith(".") else name == aside for aside in _ASIDE)


def differing_settings(groups: Sequence[Sequence[Run]]) -> list[dict[str, str]]:
    """Of each group, the settings that name it: those that were given and differ, and others if need be.

    A setting that follows from those that were given (a model brings its data set) is not among them.
    """
    identities = [identity(group[0]) for group in groups]
    texts = [{name: value_text(value) for name, value in settings.items()} for settings in identities]
    everywhere = list(dict.fromkeys(name for settings in texts for name in settings))
    differing = [name for name in everywhere if len({settings[name] for settings in texts if name in settings}) > 1]
    given = frozenset().union(*(run.overridden for group in groups for run in group))
    chosen = [name for name in differing if name in given]
    for name in differing:
        told_apart = len(set(_keys(texts, chosen)))
        if told_apart == len(groups):
            break
        if name not in chosen and len(set(_keys(texts, [*chosen, name]))) > told_apart:
            chosen.append(name)
    first = [name for name in _BARE if name in chosen]
    ordered = [*first, *(name for name in differing if name in chosen and name not in first)]
    return [{name: settings[name] for name in ordered if name in settings} for settings in texts]


def _keys(texts: Sequence[Mapping[str, str]], names: Iterable[str]) -> list[tuple[str | None, ...]]:
    chosen = list(names)
    return [tuple(settings.get(name) for name in chosen) for settings in texts]


def row_names(groups: Sequence[Sequence[Run]], differing: Sequence[Mapping[str, str]]) -> list[str]:
    """A name a group, no two alike: what differs, else the schedule."""
    names = []
    for group, settings in zip(groups, differing, strict=True):
        words = [value if name in _BARE else f"{name}={value}" for name, value in settings.items()]
        names.append(" ".join(words) or value_text(group[0].settings.get("schedule", group[0].directory.name)))
    return [
        name if names.count(name) == 1 else f"{name} #{1 + names[:at].count(name)}" for at, name in enumerate(names)
    ]


def value_text(value: object) -> str:
    """A setting's value as the command line takes it."""
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    return str(value)
