"""The schedules by name: one pure function a family, from (pp, microbatches, options) to a `Schedule`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeline.schedule.library.dualpipe_v import dualpipe_v
from pipeline.schedule.library.forward_only import forward_only
from pipeline.schedule.library.gpipe import gpipe
from pipeline.schedule.library.interleaved import interleaved_1f1b
from pipeline.schedule.library.looped_bfs import looped_bfs
from pipeline.schedule.library.one_f_one_b import eager_1f1b, one_f_one_b
from pipeline.schedule.library.v_shape import v_half, v_min, zbv
from pipeline.schedule.library.zb_auto import zb_auto
from pipeline.schedule.library.zero_bubble import interleaved_zb, zb_h1, zb_h2
from pipeline.schedule.schedule import Schedule

__all__ = [
    "SCHEDULES",
    "dualpipe_v",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "looped_bfs",
    "one_f_one_b",
    "options_of",
    "v_half",
    "v_min",
    "write",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zbv",
]

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager_1f1b": eager_1f1b,
        "interleaved_1f1b": interleaved_1f1b,
        "looped_bfs": looped_bfs,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "interleaved_zb": interleaved_zb,
        "zbv": zbv,
        "v_half": v_half,
        "v_min": v_min,
        "dualpipe_v": dualpipe_v,
        "zb_auto": zb_auto,
    }
)
"""What `write` knows. A new schedule is a function and a line here; `forward_only` takes a placement, so isn't one."""


def write(name: str, pp: int, microbatches: int, **options: object) -> Schedule:
    """The schedule called `name`. ValueError for an unknown name, an option it doesn't take, or counts it can't run."""
    taken = options_of(name)
    for option, value in options.items():
        if option not in taken:
            cure = f"use its options ({', '.join(taken)})" if taken else "drop it"
            raise ValueError(f"schedule {name} takes no option {option} ({value!r}): {cure}")
    return SCHEDULES[name](pp, microbatches, **options)


def options_of(name: str) -> tuple[str, ...]:
    """What the schedule called `name` takes besides ranks and microbatches. ValueError for an unknown name."""
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"no schedule is called {name!r}{hint}: use one of {', '.join(SCHEDULES)}")
    parameters = inspect.signature(SCHEDULES[name]).parameters
    return tuple(option for option in parameters if option not in ("pp", "microbatches"))
