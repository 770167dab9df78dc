from __future__ import annotations

import pytest

from pipeline.engine.segments import Recomputed
from pipeline.schedule.actions import ActionType
from pipeline.schedule.library import write
from pipeline.schedule.memory import Footprint
from pipeline.training.checkpointing import lowered, parse_bytes, recomputed_part
from pipeline.training.settings import ActivationCheckpointSettings, Settings


def program(*chosen, schedule=("gpipe", 2, 8), footprint=None):
    settings = Settings(activation_checkpoint=ActivationCheckpointSettings(*chosen))
    settings.check()
    return lowered(write(*schedule), settings, footprint)


def again(*chosen, **more):
    rows = program(*chosen, **more).rows
    return [sum(action.type is ActionType.R for action in row) for row in rows]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        (("always",), Recomputed()),
        (("window", None, None, 3), Recomputed()),
        (("selective",), Recomputed(keeps_costly=True)),
        (("selective", None, "costly"), Recomputed(keeps_costly=True)),
        (("selective", 2), Recomputed(2)),
        (("selective", 2, "costly"), Recomputed(2, keeps_costly=True)),
        (("window", 3, "costly", 3), Recomputed(3, keeps_costly=True)),
    ],
)
def test_the_part_that_is_recomputed(chosen, part):
    assert recomputed_part(ActivationCheckpointSettings(*chosen)) == part


def test_words_and_numbers_of_microbatches():
    assert again("never") == [0, 0]
    assert again("except_last") == [7, 7]
    assert again("always") == again("selective") == [8, 8]
    assert again("window", None, None, 3) == [5, 5]
    assert again("window", None, None, [3, 7]) == [5, 1]


def test_bytes():
    footprint = Footprint(1000.0, checkpoint=100.0)
    assert again("window", None, None, None, "3.5kB", footprint=footprint) == [5, 5]
    assert again("window", None, None, None, 3499, footprint=footprint) == [6, 6]
    assert again("window", None, None, None, 8000, footprint=footprint) == [0, 0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("window", None, None, 0), "activation_checkpoint.keep_microbatches=0 is no number of microbatches: use one"),
        (("window", None, None, "many"), "keep_microbatches=many is no number of microbatches"),
        (("window", None, None, True), "keep_microbatches=True is no number of microbatches"),
        (("window", None, None, []), r"keep_microbatches=\[\] is no number of microbatches"),
        (("window", None, None, [1, 2, 3]), r"keep_microbatches=\[1, 2, 3\]: the window has 3 limits for 2 ranks: use"),
        (("window", None, None, None, "a lot"), "activation_checkpoint.memory_limit=a lot is not a size: use one such"),
        (
            ("window", None, None, None, "2GiB"),
            "memory_limit=2GiB needs the bytes that a microbatch takes: state them, costs.",
        ),
    ],
)
def test_limits_that_can_not_be(chosen, message):
    with pytest.raises(ValueError, match=message) as caught:
        program(*chosen)
    assert "\n" not in str(caught.value)


def test_limits_that_are_too_small():
    with pytest.raises(
        ValueError, match="keep_microbatches=1: rank 1 needs 2 even with all its microbatches recomputed"
    ):
        program("window", None, None, 1, schedule=("zb_h1", 2, 4))
    with pytest.raises(ValueError, match=r"memory_limit=1kB: rank 0 needs 3,000 even .*: use that or more"):
        program("window", None, None, None, "1kB", footprint=Footprint(3000.0))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1000, 1e3),
        ("1500", 1.5e3),
        ("12 B", 12),
        ("2GiB", 2 * 1024**3),
        ("1.5 GB", 1.5e9),
        ("3M", 3e6),
        ("4kB", 4e3),
        ("4KiB", 4096),
        ("1TiB", 1024**4),
        ("0", None),
        ("-2GiB", None),
        ("GiB", None),
        ("2 gigabytes", None),
        (True, None),
        (None, None),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
