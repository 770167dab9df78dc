"""Ranks that have decided differently are found before the first message."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.training.agreement import PlanMismatchError, check_same_plan
from tests.engine.harness import plan_for, settings_for
from tests.engine.samples import linears, vectors


@dataclasses.dataclass
class Answers:
    """A group whose other rank has another plan, or the same."""

    local: tuple[int, ...] = (0,)
    first: str | None = None

    def gather(self, values):
        self.first = self.first or values[0]
        return [self.first, values[0]]


def test_the_same_plan_made_twice_is_the_same():
    group = Answers()
    for _ in range(2):
        check_same_plan(plan_for(settings_for("1f1b", 2, 2, 4), linears(2), vectors(4)[0]), group)


@pytest.mark.parametrize(
    ("name", "batch_size", "width"),
    [("gpipe", 4, 4), ("1f1b", 6, 4), ("1f1b", 4, 5)],
    ids=["program", "batch", "shape"],
)
def test_another_program_or_shape_is_named(name, batch_size, width):
    group = Answers()
    check_same_plan(plan_for(settings_for("1f1b", 2, 2, 4), linears(2), vectors(4)[0]), group)
    other = plan_for(settings_for(name, 2, 2, batch_size), linears(2, width), vectors(batch_size, width)[0])
    with pytest.raises(PlanMismatchError, match=r"ranks \[1\] have another plan than rank 0 .*: start every rank with"):
        check_same_plan(other, group)
