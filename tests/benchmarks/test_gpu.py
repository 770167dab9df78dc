from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from pipeline.engine.compilation import Compiler
from tests.benchmarks import gpu
from tests.benchmarks.cases import CPU, gpt_case

SMALL = gpt_case("small", layers=4, width=32, heads=2, context=16, batch_size=8, microbatches=4)
SCHEDULES = ("1f1b", "zbv", "dualpipe_v")
QUICK_TO_COMPILE = partial(Compiler, "aot_eager")


def test_what_a_gpu_is_asked_works_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = gpu.main(["--quick", "--json", str(file)], gpu.Setup(CPU, SMALL, 2, SCHEDULES, QUICK_TO_COMPILE))
    assert json.loads(file.read_text()) == rows
    eager, compiled, empty = rows[:3], rows[3:5], rows[5:]
    assert [row["schedule"] for row in eager] == list(SCHEDULES)
    assert [row["schedule"] for row in compiled] == list(gpu.COMPILED_SCHEDULES)
    assert [row["schedule"] for row in empty] == list(gpu.OVERHEAD_SCHEDULES)
    for row in [*eager, *compiled]:
        assert 0 <= float(row["error"]) < gpu.TOLERANCE
        assert float(row["slowdown"]) > 0
    assert all(float(row["memory_ratio"]) == pytest.approx(1, abs=0.02) for row in eager)
    assert all(float(row["us"]) > 0 for row in empty)
    assert "dualpipe_v" in capsys.readouterr().out


def test_a_wrong_gradient_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TOLERANCE", -1.0)
    with pytest.raises(SystemExit, match="gradients of 1f1b, 1f1b, zbv are off by more than -1"):
        gpu.main(["--quick"], gpu.Setup(CPU, SMALL, 2, ("1f1b",), QUICK_TO_COMPILE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == []
    assert capsys.readouterr().out.count("\n") == 1
