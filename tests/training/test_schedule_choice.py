"""From settings to a schedule: the library, files, the user's functions, and the costs that go with them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline.schedule.costs import Costs
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.torch_csv import write_csv
from pipeline.training.schedule_choice import stated_costs, stated_footprint, write_schedule
from pipeline.training.settings import CostsSettings, ScheduleSettings, Settings

HERE = "tests.training.test_schedule_choice"


def reversed_gpipe(pp: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """A function of a user's."""
    schedule = write("gpipe", pp, microbatches)
    return schedule.with_rows((*row[:microbatches], *reversed(row[microbatches:])) for row in schedule.rows)


def not_a_schedule(pp: int, microbatches: int, stages_per_rank: int) -> str:
    return "1f1b"


def settings(name: str, pp: int = 2, microbatches: int = 4, costs: CostsSettings | None = None, **options: object):
    chosen = ScheduleSettings(name, **options)  # type: ignore[arg-type]
    return Settings(pp=pp, microbatches=microbatches, schedule=chosen, costs=costs or CostsSettings())


def test_a_schedule_of_the_library():
    assert write_schedule(settings("zb_h1")) == write("zb_h1", 2, 4)
    assert write_schedule(settings("interleaved_1f1b", stages_per_rank=3)).stages == 6


def test_an_option_that_the_schedule_does_not_take():
    with pytest.raises(ValueError, match="schedule 1f1b takes no option memory_cap"):
        write_schedule(settings("1f1b", memory_cap=3))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_zb"])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_file_of_torch(tmp_path: Path, name: str, lowered: bool):
    schedule = write(name, 2, 4)
    schedule = lower(schedule) if lowered else schedule
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(schedule).text)
    found = write_schedule(settings("file", path=str(path)))
    assert (found.rows, found.stage_to_rank) == (schedule.rows, schedule.stage_to_rank)


def test_our_own_text_keeps_recomputation(tmp_path: Path):
    schedule = lower(write("gpipe", 2, 4), activation_checkpoint="always")
    path = tmp_path / "mine.txt"
    path.write_text(schedule.to_text())
    assert write_schedule(settings("file", path=str(path))) == schedule


def test_what_a_file_says_besides_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "torch.csv"
    path.write_text("0UNSHARD,0F0,0B0,0RESHARD\n")
    with caplog.at_level(logging.WARNING):
        found = write_schedule(settings("file", pp=1, microbatches=1, path=str(path)))
    assert [str(action) for action in found.rows[0]] == ["0F0", "0B0"]
    assert "left out 1 UNSHARD and 1 RESHARD" in caplog.text


def test_files_that_can_not_be(tmp_path: Path):
    with pytest.raises(ValueError, match=r"schedule.path=.*missing.csv can't be read"):
        write_schedule(settings("file", path=str(tmp_path / "missing.csv")))
    broken = tmp_path / "broken.csv"
    broken.write_text("0F0,nonsense\n")
    with pytest.raises(ValueError, match=r"schedule.path=.*broken.csv: .*nonsense"):
        write_schedule(settings("file", path=str(broken)))
    other = tmp_path / "other.csv"
    other.write_text(write_csv(write("1f1b", 3, 5)).text)
    with pytest.raises(ValueError, match=r"has 3 ranks and 5 microbatches, the run pp=2 .* use pp=3 microbatches=5"):
        write_schedule(settings("file", path=str(other)))


def test_nothing_named():
    with pytest.raises(ValueError, match="schedule=file needs a file"):
        write_schedule(settings("file"))
    with pytest.raises(ValueError, match="schedule=custom needs a function"):
        write_schedule(settings("custom"))


def test_a_function_of_the_user():
    found = write_schedule(settings("custom", target=f"{HERE}:reversed_gpipe"))
    assert [str(action) for action in found.rows[1]] == ["1F0", "1F1", "1F2", "1F3", "1B3", "1B2", "1B1", "1B0"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no.such.module:function", "can't be imported"),
        (f"{HERE}:no_such_function", "can't be imported"),
        ("nothing", "can't be imported"),
        (f"{HERE}:not_a_schedule", "returned str: return a Schedule"),
    ],
)
def test_functions_that_can_not_be(target: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        write_schedule(settings("custom", target=target))


def test_release_is_for_overlapped_pairs():
    assert write_schedule(settings("dualpipe_v", release="each")).release == "each"
    with pytest.raises(ValueError, match="release=each is for overlapped pairs, which 1f1b has none of"):
        write_schedule(settings("1f1b", release="each"))


def test_zb_auto_reckons_with_the_stated_costs():
    cheap = write_schedule(settings("zb_auto", 4, 8, memory_cap=4))
    uneven = CostsSettings(forward=[1, 1, 3, 1], backward_input=[1, 1, 3, 1], backward_weight=[1, 1, 3, 1])
    assert write_schedule(settings("zb_auto", 4, 8, costs=uneven, memory_cap=4)).rows != cheap.rows
    assert write_schedule(settings("zb_auto", 2, 4, placement="v")).stage_to_rank == (0, 1, 1, 0)


def test_costs():
    line, loop = (0, 1), (0, 1, 0, 1)
    assert stated_costs(settings("1f1b"), line) == Costs(
        forward=(1.0, 1.0),
        backward_input=(1.0, 1.0),
        backward_weight=(1.0, 1.0),
        transfer=(0.0, 0.0),
        boundary_bytes=(0.0, 0.0),
    )
    per_rank = CostsSettings(per="rank", forward=2, backward=[4, 8])
    found = stated_costs(settings("1f1b", costs=per_rank), loop)
    assert found.forward == (1.0,) * 4
    assert found.backward == (2.0, 4.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("costs", "problem"),
    [
        (CostsSettings(forward="fast"), "costs.forward=fast is not a number"),
        (CostsSettings(forward=True), "costs.forward=True is not a number"),
        (CostsSettings(forward=[1, 2, 3]), "costs.forward has 3 entries for 2 stages"),
        (CostsSettings(transfer=-1), "costs.transfer is -1"),
    ],
)
def test_costs_that_can_not_be(costs: CostsSettings, problem: str):
    with pytest.raises(ValueError, match=problem):
        stated_costs(settings("1f1b", costs=costs), (0, 1))


def test_bytes_only_where_they_are_stated():
    assert stated_footprint(Settings(), (0, 1)) is None
    footprint = stated_footprint(Settings(costs=CostsSettings(activation_bytes=[3, 4], boundary_bytes=2)), (0, 1))
    assert footprint is not None
    assert (footprint.activation, footprint.boundary) == ((3.0, 4.0), 2.0)
    share = stated_footprint(Settings(costs=CostsSettings(activation_bytes=6, boundary_bytes=2)), (0, 1, 1, 0), "rank")
    assert share is not None
    assert (share.activation, share.boundary) == ((3.0,) * 4, 2.0)
