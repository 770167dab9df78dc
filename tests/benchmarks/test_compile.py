from __future__ import annotations

import pytest

from pipeline.engine.compilation import Compiler
from tests.benchmarks.compile import QUICK, Timed, _check


def test_both_kinds_are_compared_and_a_difference_is_refused() -> None:
    plain, compiled = Timed(QUICK[0], None, True), Timed(QUICK[0], Compiler("aot_eager"), True)
    _check(QUICK[0], plain.gradients(), compiled.gradients())
    compiled.measure()
    assert all(seconds > 0 for seconds in compiled.medians())
    with pytest.raises(ValueError, match="gpt in fp32: a compiled gradient is off"):
        _check(QUICK[0], [gradient * 1.01 for gradient in plain.gradients()], compiled.gradients())
