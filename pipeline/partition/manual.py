"""A cut given by the user."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise


def manual(chosen: Sequence[int | str], layers: Sequence[str], stages: int) -> tuple[int, ...]:
    """The given number of layers a stage, or the name of each stage's first layer, checked.

    By number a stage between others may be empty: it passes on what comes.

    Args:
        chosen: whole numbers, or names, an entry a stage.
        layers: the names of the model's layers.

    Raises:
        ValueError: the entries are not one a stage, a number is under 0 or that of an end under 1, the numbers do not
            add up to the model's layers, or the names aren't layers in order from the first.
    """
    given = f"partition.layers={list(chosen)}"
    names, counts = _split(chosen)
    if names and counts:
        raise ValueError(f"{given} mixes numbers and names: give how many layers each stage holds, or its first one")
    if len(chosen) != stages:
        raise ValueError(
            f"{given} names {len(chosen)} stages, the schedule has {stages}: give {stages} numbers that add up to "
            f"{len(layers)}, or the names of {stages} layers"
        )
    if names:
        counts = _from_names(given, names, layers)
    if min(counts) < 0 or counts[0] == 0 or counts[-1] == 0:
        raise ValueError(
            f"{given} leaves an end empty or takes layers away: give the first and the last stage at least 1, the "
            "others 0 or more"
        )
    if sum(counts) != len(layers):
        raise ValueError(f"{given} adds up to {sum(counts)}, the model has {len(layers)} layers: make them equal")
    return tuple(counts)


def _split(chosen: Sequence[int | str]) -> tuple[list[str], list[int]]:
    for entry in chosen:
        if isinstance(entry, bool) or not isinstance(entry, int | str):
            raise ValueError(
                f"partition.layers={list(chosen)} has {entry!r}: use whole numbers of layers, or layers' names"
            )
    return [one for one in chosen if isinstance(one, str)], [one for one in chosen if isinstance(one, int)]


def _from_names(given: str, names: Sequence[str], layers: Sequence[str]) -> list[int]:
    starts = []
    for name in names:
        if name not in layers:
            near = get_close_matches(name, layers, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are called {layers[0]} ... {layers[-1]}"
            raise ValueError(f"{given} names {name}, which is no layer of the model: {hint}")
        starts.append(layers.index(name))
    if starts[0] != 0:
        raise ValueError(f"{given} begins with {names[0]}, the model with {layers[0]}: name each stage's first layer")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(f"{given} is not in the model's order: name each stage's first layer, {layers[0]} first")
    return [later - earlier for earlier, later in pairwise([*starts, len(layers)])]
