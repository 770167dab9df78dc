"""compile=true as users meet it: inductor's code in real processes, with split backwards and dropout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import command
from tests.command import Ran
from tests.training.harness import relative_error

RUN = ["schedule=zb_h1", "validate_every=0", "model.dropout=0.1", "optimizer.learning_rate=1e-2", "logger=none"]


def losses(ran: Ran) -> list[float]:
    """Of the steps, all of which are logged."""
    return [json.loads(line)["loss"] for line in ran.file("metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(400)
def test_a_compiled_run_is_the_uncompiled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found = {}
    for value in ("true", "false"):
        (tmp_path / value).mkdir()
        ran = command.train(tmp_path / value, *RUN, f"compile={value}")
        assert ran.status == 0, ran.err
        found[value] = losses(ran)
        assert ("compiled in" in ran.file("train.log").read_text()) == (value == "true")
    assert len(found["true"]) == 3
    assert relative_error(found["true"], found["false"]) < 1e-5
    assert list((tmp_path / "cache").rglob("*.cpp")), "inductor made code"


def test_without_a_c_compiler_it_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ran = command.train(tmp_path, *RUN, "compile=true")
    assert ran.status == 2
    assert ran.errors == [
        "ERROR: compile=true needs a C++ compiler, and there is none: install g++ or name one in CXX, or use "
        "compile=false"
    ]
