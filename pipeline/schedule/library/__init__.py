"""The schedules by name: one pure function a family, from (pp, microbatches, options) to a `Schedule`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeline.schedule.library.forward_only import forward_only
from pipeline.schedule.library.gpipe import gpipe
from pipeline.schedule.library.interleaved import interleaved_1f1b
from pipeline.schedule.library.one_f_one_b import one_f_one_b
from pipeline.schedule.schedule import Schedule

__all__ = ["SCHEDULES", "forward_only", "gpipe", "interleaved_1f1b", "one_f_one_b", "options_of", "write"]

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
    }
)
"""What `write` knows. A new schedule is a function and a line here; `forward_only` takes a placement, so isn't one."""


def write(name: str, pp: int, microbatches: int, **options: object) -> Schedule:
    """The schedule called `name`. ValueError for an unknown name, an option it doesn't take, or counts it can't run."""
    taken = options_of(name)
    for option, value in options.items():
        if option not in taken:
            known = ", ".join(taken) or "none"
            raise ValueError(f"schedule {name} takes no option {option} ({value!r}): use its options ({known})")
    return SCHEDULES[name](pp, microbatches, **options)


def options_of(name: str) -> tuple[str, ...]:
    """What the schedule called `name` takes besides ranks and microbatches. ValueError for an unknown name."""
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(name, SCHEDULES, n=1, cutoff=0.4)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"no schedule is called {name!r}{hint}: use one of {', '.join(SCHEDULES)}")
    parameters = inspect.signature(SCHEDULES[name]).parameters
    return tuple(option for option in parameters if option not in ("pp", "microbatches"))
