"""What hypothesis draws schedules from."""

from __future__ import annotations

from hypothesis import strategies as st

from pipeline.schedule.library import options_of, write
from pipeline.schedule.schedule import Schedule

FIXED = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe_v",
)
"""The schedules that counts alone decide."""


def library_schedules(pp: int, microbatches: int, stages_per_rank: int = 2) -> st.SearchStrategy[Schedule]:
    """Any schedule of the library at any counts it takes, up to these; dualpipe_v with 2p microbatches more."""

    def written(name: str, ranks: int, count: int, stages: int) -> Schedule:
        least = 2 * ranks if name == "dualpipe_v" else 0
        options = {"stages_per_rank": stages} if "stages_per_rank" in options_of(name) else {}
        return write(name, ranks, least + count, **options)

    counts = (st.integers(1, most) for most in (pp, microbatches, stages_per_rank))
    return st.builds(written, st.sampled_from(FIXED), *counts)
