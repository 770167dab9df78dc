"""CSV files go to and from torch's own reader and writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from pipeline.schedule.actions import Action
from pipeline.schedule.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b, write
from pipeline.schedule.lowering import lower
from pipeline.schedule.schedule import Schedule
from pipeline.schedule.torch_csv import read_csv, write_csv
from pipeline.schedule.validate import validate
from tests.schedule.strategies import FIXED, library_schedules


@settings(deadline=None, derandomize=True, max_examples=60)
@given(library_schedules(5, 9))
def test_csv_loses_nothing_but_the_name(schedule: Schedule) -> None:
    for written in (schedule, lower(schedule)):
        text, notes = write_csv(written)
        assert notes == ()
        assert read_csv(text, name=written.name) == (written, ())


def test_csv_is_torchs() -> None:
    assert write_csv(one_f_one_b(2, 2)).text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_bubbles_are_skipped() -> None:
    read = read_csv("0F0,0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n\r\n", name="1f1b")
    assert read == (one_f_one_b(2, 2), ())


def test_csv_without_backward_is_forward_only() -> None:
    schedule = forward_only((0, 1), 3)
    assert read_csv(write_csv(schedule).text, name="forward_only").schedule == schedule


def test_sharding_is_left_out_in_one_line() -> None:
    text = "0UNSHARD,1UNSHARD,0F0,1F0,0RESHARD,1B0,1REDUCE_GRAD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD,1RESHARD\n"
    read = read_csv(text, name="mine")
    assert read.notes == ("mine: left out 3 UNSHARD and 3 RESHARD, which shard parameters and order nothing here",)
    assert read.schedule.rows == (
        tuple(map(Action.parse, ["0F0", "1F0", "1B0", "1REDUCE_GRAD", "0B0", "0REDUCE_GRAD"])),
    )
    assert (read.schedule.stage_to_rank, read.schedule.microbatches) == ((0, 0), 1)
    validate(read.schedule)


def test_a_pair_names_the_stages_and_microbatches_of_its_parts() -> None:
    schedule = read_csv("0F0,1F0,1B0,(0F1;0B0)OVERLAP_F_B,(1F1;1B2)OVERLAP_F_B\n").schedule
    assert (schedule.stage_to_rank, schedule.microbatches, schedule.forward_only) == ((0, 0), 3, False)


def test_recomputation_is_left_out_in_one_line() -> None:
    program = lower(gpipe(2, 3), activation_checkpoint="except_last")
    text, notes = write_csv(program)
    assert notes == ("gpipe: left out 4 R, which torch's reader refuses; the text form keeps them",)
    assert read_csv(text, name="gpipe").schedule == lower(gpipe(2, 3))
    assert Schedule.from_text(program.to_text()) == program


def test_release_is_left_out_in_one_line() -> None:
    text, notes = write_csv(replace(gpipe(1, 1), release="each"))
    assert notes == ("gpipe: torch's CSV has no word for release=each; set it again where the file is read",)
    assert text == "0F0,0B0\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no action"),
        ("0UNSHARD\n", "holds no action"),
        ("0F0,0X0\n", "'0X0' is not an action"),
        ("0F0\n2F0\n", "stage 1 has no action"),
        ("0F0\n1F0,0B0\n", "0B0 is on rank 1, but stage 0 is on rank 0"),
        ("0F0\n1F0,(1F1;0B0)OVERLAP_F_B\n", "0B0 is on rank 1, but stage 0 is on rank 0"),
        ("0F0\n\n1F0\n", "line 2 of the CSV is empty"),
    ],
)
def test_a_broken_csv_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_csv(text)


class TorchRuntime:
    """torch's reader and writer of CSV files, without the process groups and stages it otherwise takes."""

    def __init__(self, schedule: Schedule) -> None:
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        self.runtime = object.__new__(_PipelineScheduleRuntime)
        self.runtime.pp_group_size = schedule.pp
        self.runtime._num_stages = schedule.stages
        self.runtime._n_microbatches = schedule.microbatches
        self.runtime._stages = []
        self.runtime._defer_pp_recv = False
        self.runtime.pipeline_order = {}

    def round_trip(self, text: str, folder: Path, kind: str, *, back: str | None = None) -> str:
        """What torch writes after it read `text`; with `back` "compute_comms" it adds communication in between."""
        into, out = folder / "into.csv", folder / "out.csv"
        into.write_text(text)
        self.runtime._load_csv(str(into), format=kind)
        self.runtime._dump_csv(str(out), format=back or kind)
        return out.read_text()


def counts(name: str) -> tuple[int, int]:
    return (2, 4) if name == "dualpipe_v" else (3, 5)


@pytest.mark.parametrize("name", FIXED)
def test_torch_reads_and_writes_our_compute(name: str, tmp_path: Path) -> None:
    schedule = write(name, *counts(name))
    written = TorchRuntime(schedule).round_trip(write_csv(schedule).text, tmp_path, "compute_only")
    assert read_csv(written, name=name) == (schedule, ())


@pytest.mark.parametrize("name", FIXED)
def test_torch_reads_and_writes_our_communication(name: str, tmp_path: Path) -> None:
    program = lower(write(name, *counts(name)), activation_checkpoint="always")
    text = write_csv(program).text
    written = TorchRuntime(program).round_trip(text, tmp_path, "compute_comms")
    assert written == text
    assert read_csv(written, name=name).schedule == lower(write(name, *counts(name)))


@pytest.mark.parametrize("name", FIXED)
def test_a_program_that_torch_lowered_is_proven(name: str, tmp_path: Path) -> None:
    schedule = write(name, *counts(name))
    written = TorchRuntime(schedule).round_trip(
        write_csv(schedule).text, tmp_path, "compute_only", back="compute_comms"
    )
    program, notes = read_csv(written, name=name)
    assert len(notes) == 1
    assert "UNSHARD" in written
    assert program.compute_only() == schedule
    assert sum(action.type.name == "REDUCE_GRAD" for row in program.rows for action in row) == schedule.stages
    validate(program)


def test_every_word_is_torchs() -> None:
    from torch.distributed.pipelining.schedules import _Action

    program = lower(write("dualpipe_v", 2, 4))
    reductions = map(Action.parse, ("0REDUCE_GRAD", "12REDUCE_GRAD"))
    for action in (*(action for row in program.rows for action in row), *reductions):
        assert repr(_Action.from_str(str(action))) == str(action)


def test_torchs_interleaved_file_with_bubbles() -> None:
    from torch.distributed.pipelining.schedules import _Action

    words = [[str(action) for action in row] for row in interleaved_1f1b(2, 4, 2).rows]
    text = "\n".join(",".join(str(_Action.from_str(word)) for word in row) + ",," for row in words)
    assert read_csv(text, name="interleaved_1f1b").schedule == interleaved_1f1b(2, 4, 2)
