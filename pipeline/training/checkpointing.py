"""From the settings of activation checkpointing to the program that recomputes, and the part of a stage it repeats."""

from __future__ import annotations

import re
from typing import Any

from pipeline.engine.segments import Recomputed
from pipeline.schedule.lowering import lower
from pipeline.schedule.memory import Footprint
from pipeline.schedule.recomputation import Window
from pipeline.schedule.schedule import Schedule
from pipeline.training.settings import ActivationCheckpointSettings, Settings


def recomputed_part(chosen: ActivationCheckpointSettings) -> Recomputed:
    """The part of a stage that an R computes again: all of it, unless the settings say less."""
    return Recomputed(chosen.every or 1, keeps_costly=chosen.keeps_costly)


def lowered(schedule: Schedule, settings: Settings, footprint: Footprint | None = None) -> Schedule:
    """The program that the settings make of a schedule.

    Args:
        footprint: the bytes that a microbatch takes, for a window with a limit in bytes.

    Raises:
        ValueError: a limit that is no number, that can't be met, or in bytes without a footprint.
    """
    chosen = settings.activation_checkpoint
    options = {"prefetch": settings.prefetch, "replicas": settings.dp}
    if chosen.name != "window":
        return lower(schedule, activation_checkpoint=chosen.name, **options)
    window = _by_count(chosen) if chosen.memory_limit is None else _by_bytes(chosen, footprint)
    try:
        return lower(schedule, activation_checkpoint=window, **options)
    except ValueError as error:
        raise ValueError(f"{_given(chosen)}: {error}") from error


def _by_count(chosen: ActivationCheckpointSettings) -> Window:
    value = chosen.keep_microbatches
    entries = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not entries or any(isinstance(entry, bool) or not isinstance(entry, int) or entry < 1 for entry in entries):
        raise ValueError(f"{_given(chosen)} is no number of microbatches: use one such as 4, or a list with one a rank")
    return Window(entries if isinstance(value, list | tuple) else value)


def _by_bytes(chosen: ActivationCheckpointSettings, footprint: Footprint | None) -> Window:
    limit = parse_bytes(chosen.memory_limit)
    if limit is None:
        raise ValueError(f"{_given(chosen)} is not a size: use one such as 2GiB, 500MB or 1000000")
    if footprint is None:
        raise ValueError(
            f"{_given(chosen)} needs the bytes that a microbatch takes: state them, costs.activation_bytes=..., or "
            "limit their number, activation_checkpoint.keep_microbatches=..."
        )
    return Window(limit, footprint)


def _given(chosen: ActivationCheckpointSettings) -> str:
    name = "keep_microbatches" if chosen.memory_limit is None else "memory_limit"
    return f"activation_checkpoint.{name}={getattr(chosen, name)}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?|B?)")


def parse_bytes(value: Any) -> float | None:
    """A size of more than 0 bytes from a number or words such as 2GiB (2 x 1024^3) and 2GB (2 x 1000^3), else None."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        return None
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** ("kMGT".index(prefix.replace("K", "k")) + 1 if prefix else 0)
    return size if size > 0 else None
