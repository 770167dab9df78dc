from __future__ import annotations

import pytest

from pipeline.partition import manual


def test_a_manual_cut_is_taken_as_it_is():
    assert manual([1, 4, 2], list("abcdefg"), 3) == (1, 4, 2)
    assert manual([3, 0, 4], list("abcdefg"), 3) == (3, 0, 4)


def test_a_stage_can_be_named_by_its_first_layer():
    assert manual(["a", "b", "f"], list("abcdefg"), 3) == (1, 4, 2)
    assert manual(["0", "2"], list("01234"), 2) == (2, 3), "a name of digits, in quotes"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "names 0 stages, the schedule has 2: give 2 numbers that add up to 5"),
        ([5], "names 1 stages, the schedule has 2"),
        ([1, 2, 2], "names 3 stages, the schedule has 2"),
        ([0, 5], r"partition.layers=\[0, 5\] leaves an end empty or takes layers away: give the first and the last"),
        ([5, 0], "leaves an end empty"),
        ([6, -1], "leaves an end empty or takes layers away"),
        ([2, 2], r"partition.layers=\[2, 2\] adds up to 4, the model has 5 layers"),
        ([3, 3], "adds up to 6, the model has 5 layers"),
        ([1, "two"], "mixes numbers and names: give how many layers each stage holds, or its first one"),
        ([1, 1.5], "has 1.5: use whole numbers of layers, or layers' names"),
        ([1, True], "has True: use whole numbers of layers, or layers' names"),
        ([1, None], "has None: use whole numbers of layers, or layers' names"),
        (["one", "thre"], "names thre, which is no layer of the model: did you mean three?"),
        (["one", "x"], "names x, which is no layer of the model: they are called one ... five"),
        (["two", "three"], "begins with two, the model with one: name each stage's first layer"),
        (["one", "one"], "is not in the model's order: name each stage's first layer, one first"),
        (["one"], "names 1 stages, the schedule has 2: give 2 numbers that add up to 5, or the names of 2 layers"),
    ],
)
def test_a_manual_cut_that_cannot_be_is_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        manual(counts, ["one", "two", "three", "four", "five"], 2)
