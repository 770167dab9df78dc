from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.split_backward import CASES, PRECISIONS, main


def test_rows_have_the_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = main(["--quick", "--json", str(file)], CASES[:1])
    assert json.loads(file.read_text()) == rows
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    assert [(row["dtype"], row["autocast"]) for row in rows] == [
        (str(precision.dtype).removeprefix("torch."), precision.autocast) for precision in PRECISIONS
    ]
    for row in rows:
        assert row["model"] == CASES[0].name
        for ratio in ("split_over_full", "torch_split_over_full", "forward_over_plain"):
            assert float(row[ratio]) > 0
