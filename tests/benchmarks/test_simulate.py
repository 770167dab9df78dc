from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.simulate import SCHEDULES, main


def test_time_grows_with_the_number_of_actions_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = main(["--quick", "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    for name in SCHEDULES:
        per_action = [float(row["us an action"]) for row in rows if row["schedule"] == name]
        # Sixteen times the actions: quadratic work would cost sixteen times as much for each.
        assert per_action[-1] < 5 * per_action[0]
