"""The picture of a step."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.image import imread

from pipeline.report import timeline
from pipeline.report.idle_text import idle_table
from pipeline.report.looks import IDLE, LOOKS, MESSAGES
from pipeline.schedule.actions import Action, ActionType
from pipeline.schedule.library import write
from pipeline.schedule.lowering import lower
from pipeline.schedule.simulate import Costs, Event, Idle, Simulation, nominal_costs, simulate

PREDICTED = simulate(write("1f1b", 2, 4), nominal_costs(1)).events
# The same step measured: 10 ms a unit, on a clock that has been running for long, forwards a bit slow.
MEASURED = tuple(
    tuple(Event(event.rank, event.action, 5000 + event.start, 5000 + event.end) for event in row)
    for row in simulate(write("1f1b", 2, 4), Costs(forward=0.016, backward=0.020)).events
)


def event(rank: int, word: str, start: float, end: float) -> Event:
    return Event(rank, Action.parse(word), start, end)


def drawn(tmp_path: Path, *rows: timeline.Rows, title: str = "") -> Any:
    timeline.draw(tmp_path / "timeline.png", *rows, title=title)
    return imread(tmp_path / "timeline.png")[:, :, :3]


def has_color(image: Any, color: str) -> bool:
    """Whether more than a speck of the picture has this very color."""
    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return bool((abs(image - wanted).max(axis=2) < 0.004).sum() > 50)


def test_the_picture_shows_every_type_in_its_own_color(tmp_path: Path) -> None:
    words = ["0F0", "0R0", "0I0", "0W0", "0F1", "0B1"]
    row = [event(0, word, at, at + 1) for at, word in enumerate(words)]
    image = drawn(tmp_path, [row], [row], title="all types")
    faces = [look.face for look in LOOKS.values()]
    assert len(set(faces)) == 5
    assert all(has_color(image, face) for face in faces)


# What the three kinds of color blindness see of linear red, green and blue (Machado, Oliveira, Fernandes 2009, table 1,
# severity 1), besides those who see all of it.
SEEN_BY = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def lightness(color: str, seen_by: str) -> float:
    """CIE L*, 0 to 100, of what is seen of a color."""
    srgb = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in srgb]
    red, green, blue = (sum(f * c for f, c in zip(row, linear, strict=True)) for row in SEEN_BY[seen_by])
    luminance = max(0.0, 0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_types_differ_by_lightness_alone_whoever_looks(seen_by: str) -> None:
    """So they do in gray."""
    ladder = sorted(lightness(look.face, seen_by) for look in (*LOOKS.values(), IDLE))
    assert all(high - low > 7 for low, high in pairwise(ladder)), ladder
    for look in LOOKS.values():
        assert abs(lightness(look.face, seen_by) - lightness(look.text, seen_by)) > 40


def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *rows: timeline.Rows, **options: Any) -> list[str]:
    """Everything written in the picture."""
    seen: list[str] = []
    save = timeline.Figure.savefig

    def keep(figure: Any, *args: Any, **named: Any) -> None:
        for axes in figure.axes:
            seen.extend(text.get_text() for text in (axes._left_title, axes.xaxis.label))
            seen.extend(labels.get_label() for labels in axes.collections for _ in labels.get_offsets())
            seen.extend(label.get_text() for label in axes.get_yticklabels())
        seen.extend(text.get_text() for text in figure.texts)
        seen.extend(text.get_text() for legend in figure.legends for text in legend.get_texts())
        save(figure, *args, **named)

    monkeypatch.setattr(timeline.Figure, "savefig", keep)
    timeline.draw(tmp_path / "timeline.png", *rows, **options)
    return seen


def test_the_picture_names_both_bubbles_axes_ranks_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = texts(monkeypatch, tmp_path, MEASURED, PREDICTED, title="1f1b, gpt")
    assert "1f1b, gpt" in seen
    assert "makespan bubble: measured 20.0 %, predicted 20.0 %" in seen
    assert "Measured: one step, 180.0 ms" in seen
    assert "Predicted: 15 nominal units" in seen
    assert seen.index("seconds") < seen.index("nominal units")
    assert seen.count("rank 1") == 2
    assert [text for text in seen if text in ("F forward", "B backward", "R recompute", "idle")] == [
        "F forward",
        "B backward",
        "idle",
    ]
    assert [seen.count(str(microbatch)) for microbatch in range(4)] == [8, 8, 8, 8]  # 2 panels, 2 ranks, F and B


def test_the_stage_is_shown_where_a_rank_holds_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate(write("interleaved_1f1b", 2, 2, stages_per_rank=2), nominal_costs(2)).events
    seen = texts(monkeypatch, tmp_path, (), events)
    assert [seen.count(f"s{stage}") for stage in range(4)] == [4, 4, 4, 4]
    assert not [text for text in texts(monkeypatch, tmp_path, (), PREDICTED) if text.startswith("s0")]


def test_numbers_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [event(0, "0F0", 0, 1000), event(0, "0F77", 1000, 1001)]
    seen = texts(monkeypatch, tmp_path, [long], ())
    assert "0" in seen
    assert "77" not in seen


def test_many_ranks_make_a_picture_of_bounded_size(tmp_path: Path) -> None:
    events = simulate(write("1f1b", 32, 64), nominal_costs(1)).events
    height, width = drawn(tmp_path, events, events).shape[:2]
    assert width <= 3600
    assert height <= 2150


def test_both_panels_have_one_scale(tmp_path: Path) -> None:
    late = [[event(0, "0F0", 0, 1), event(0, "0B0", 4, 6)]]
    prompt = [[event(0, "0F0", 0, 1), event(0, "0B0", 1, 3)]]
    image = drawn(tmp_path, late, prompt)
    blue = [int(LOOKS[ActionType.B].face[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    is_backward = (abs(image - blue).max(axis=2) < 0.004)[:-45]  # without the legend
    half = image.shape[0] // 2
    first = [columns.any(axis=0).nonzero()[0].min() for columns in (is_backward[:half], is_backward[half:])]
    left = 0.75 / 12 * image.shape[1]
    assert (first[0] - left) / (first[1] - left) == pytest.approx(4, rel=0.03)


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    before = matplotlib.rcParams.copy()
    pyplot = "matplotlib.pyplot" in sys.modules
    drawn(tmp_path, MEASURED, PREDICTED)
    assert matplotlib.rcParams.copy() == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no event to draw: give the events of a step"):
        timeline.draw(tmp_path / "timeline.png", ((), ()), ())


def predicted(name: str, transfer: float = 0.0, *, is_lowered: bool = False, **options: object) -> Simulation:
    schedule = write(name, 4, 8, **options)
    return simulate(lower(schedule) if is_lowered else schedule, Costs(transfer=transfer))


def test_a_prediction_alone_has_both_bubbles_in_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = texts(monkeypatch, tmp_path, (), predicted("zb_h2").events, unit="ms")
    assert "bubble: makespan 11.1 %, span 0.0 %" in seen
    assert "Predicted: 27 ms" in seen
    assert "ms" in seen


def test_a_pair_is_two_half_bars_with_both_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [[event(0, "(0F7;3B5)OVERLAP_F_B", 0, 3)]]
    seen = texts(monkeypatch, tmp_path, (), pair)
    assert [seen.count(text) for text in ("7", "5", "s0", "s3")] == [1, 1, 1, 1]
    assert [text for text in seen if text in [look.label for look in LOOKS.values()]] == ["F forward", "B backward"]
    image = drawn(tmp_path, (), pair)
    forward, backward = (is_color(image[:-45], LOOKS[kind].face) for kind in (ActionType.F, ActionType.B))
    assert forward.any(axis=1).nonzero()[0].max() < backward.any(axis=1).nonzero()[0].min() + 2
    assert forward.sum() == pytest.approx(backward.sum(), rel=0.1)


def is_color(image: Any, color: str) -> Any:
    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return abs(image - wanted).max(axis=2) < 0.004


@pytest.mark.parametrize("is_lowered", [False, True])
def test_messages_are_thin_marks_where_they_take_time(tmp_path: Path, is_lowered: bool) -> None:
    instant, slow = (predicted("zb_h1", transfer, is_lowered=is_lowered) for transfer in (0.0, 0.5))
    for simulation, is_marked in ((instant, False), (slow, True)):
        timeline.draw(tmp_path / "it.png", (), simulation.events, transfers=simulation.transfers)
        image = imread(tmp_path / "it.png")[:, :, :3]
        assert [bool(is_color(image[:-60], look.face).sum() > 200) for look in MESSAGES.values()] == [is_marked] * 2
    # between lanes, never on one: no row of pixels has both a mark and a bar
    marks, bars = (is_color(image[:-60], face).sum(axis=1) > 30 for face in ("#222222", LOOKS[ActionType.I].face))
    assert not (marks & bars).any()


def test_a_mark_is_as_long_as_its_message_is_under_way(tmp_path: Path) -> None:
    """At a scale of its own: rank 0's first activation takes half of what its forward does."""
    simulation = simulate(write("1f1b", 2, 1), Costs(transfer=0.5))
    timeline.draw(tmp_path / "it.png", (), simulation.events, transfers=simulation.transfers)
    image = imread(tmp_path / "it.png")[:-60, :, :3]
    mark = is_color(image, MESSAGES["activation"].face)
    row = mark.sum(axis=1).argmax()
    forward = is_color(image, LOOKS[ActionType.F].face)
    length = forward[forward.sum(axis=1).argmax()].sum() / 2  # rank 0's and rank 1's are in two rows of pixels
    wide = mark[row].nonzero()[0]
    assert wide.max() - wide.min() == pytest.approx(length, rel=0.1)


def test_the_legend_says_what_the_marks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = predicted("1f1b", 0.5)
    seen = texts(monkeypatch, tmp_path, (), simulation.events, transfers=simulation.transfers)
    assert {look.label for look in MESSAGES.values()} <= set(seen)
    assert not {look.label for look in MESSAGES.values()} & set(texts(monkeypatch, tmp_path, (), simulation.events))


def test_the_suffix_decides_and_one_picture_has_one_form_in_both_files(tmp_path: Path) -> None:
    events = predicted("dualpipe_v").events
    timeline.draw([tmp_path / "a.png", tmp_path / "a.svg"], (), events)
    timeline.draw([tmp_path / "b.png", tmp_path / "b.svg"], (), events)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    for kind in ("png", "svg"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    with pytest.raises(ValueError, match=r"cannot draw a\.pdf: use a name that ends in \.png or \.svg"):
        timeline.draw(tmp_path / "a.pdf", (), events)


def test_a_large_schedule_is_a_small_file(tmp_path: Path) -> None:
    events = simulate(write("zb_h1", 16, 600), Costs()).events
    timeline.draw([tmp_path / "it.png", tmp_path / "it.svg"], (), events)
    assert (tmp_path / "it.svg").stat().st_size < 4_000_000
    assert (tmp_path / "it.png").stat().st_size < 4_000_000


def test_bars_of_one_width_are_all_labeled_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 123 does not fit, 7 is not shown either: a reader would take it for the only one there."""
    rows = [[event(0, f"0F{at}", at, at + 1) for at in range(400)]]
    assert not {str(at) for at in range(400)} & set(texts(monkeypatch, tmp_path, (), rows))


def test_a_prediction_in_seconds_keeps_its_length_and_idle_times_stand_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = simulate(write("1f1b", 2, 4), Costs(forward=0.016, backward=0.022)).events
    idle = idle_table([Idle(tail=0.05)], [Idle(tail=0.04)])
    options = {"unit": "seconds", "remark": "costs profiled in steps 3 to 9", "idle": idle}
    seen = texts(monkeypatch, tmp_path, MEASURED, profiled, **options)
    assert "Measured: one step, 180.0 ms" in seen
    assert "Predicted: one step, 190.0 ms (costs profiled in steps 3 to 9)" in seen
    assert "Idle time in ms, measured / predicted" in seen
    assert seen.count("50.0 / 40.0") == 2, "in all, and as tail"
