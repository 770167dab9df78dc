"""profile.json, there and back, and what can't be taken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.partition import LayerCosts
from pipeline.training.profile_file import Conditions, ModelProfile

CONDITIONS = Conditions("chain", (4, 8), (20, 0), "fp32", False, False, "cpu", 1, "2.14.0")
PROFILE = ModelProfile(
    CONDITIONS,
    (
        LayerCosts("0", 0.1, 1 / 3, 1e-7, 128.0, 64, 240, backward=0.2, recompute=0.1, kept_output_bytes=0.0),
        LayerCosts("1", 0.3, 0, 0, None, 4, 0, tied=("0",)),
    ),
)


def test_there_and_back(tmp_path: Path):
    PROFILE.write(tmp_path / "profile.json")
    found = ModelProfile.read(tmp_path / "profile.json")
    assert found == PROFILE
    found.check(tmp_path, CONDITIONS, ["0", "1"])


def test_what_is_no_profile_is_refused(tmp_path: Path):
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError, match=r"can't be read \(.*\): make one with task=profile"):
        ModelProfile.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"can't be read"):
        ModelProfile.read(path)
    for written in ("[]", '{"format": 2}'):
        path.write_text(written)
        with pytest.raises(ValueError, match=r"has format (None|2), not 1: make one"):
            ModelProfile.read(path)


@pytest.mark.parametrize(
    ("field", "value"), [("forward", -1), ("forward", float("nan")), ("backward", "x"), ("more", 1), ("name", 3)]
)
def test_a_damaged_profile_is_refused(tmp_path: Path, field: str, value: object):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    written = json.loads(path.read_text())
    written["layers"][1][field] = value
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"is damaged \(.*\): make one"):
        ModelProfile.read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": ...}, r"is damaged \(it lacks threads\): make one"),
        ({"inputs": 3}, "is damaged"),
        ({"layers": 3}, "is damaged"),
        ({"layers": [3]}, "is damaged"),
        ({"layers": ...}, "is of chain with 0 layers and the run's model, chain, has 2, or others"),
        ({"parameters": [20]}, "is of chain with 2 layers and the run's model, chain, has 2, or others"),
    ],
)
def test_a_profile_with_a_damaged_head_is_refused(tmp_path: Path, change: dict[str, object], words: str):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    written = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not ...}))
    with pytest.raises(ValueError, match=words):
        ModelProfile.read(path).check(path, CONDITIONS, ["0", "1"])


def test_another_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is of chain with 2 layers and the run's model, chain, has 1, or others"):
        PROFILE.check(tmp_path, CONDITIONS, ["0"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("inputs", (2, 8)), ("precision", "bf16"), ("keeps_costly", True), ("compiled", True)],
)
def test_other_conditions_are_refused(tmp_path: Path, field: str, value: object):
    with pytest.raises(ValueError, match=f"was measured with {field} .* and the run has .*: make one"):
        PROFILE.check(tmp_path, replace(CONDITIONS, **{field: value}), ["0", "1"])


def test_other_sizes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="was measured with 0 parameters in layer 1 and the run has 8: make one"):
        PROFILE.check(tmp_path, replace(CONDITIONS, parameters=(20, 8)), ["0", "1"])


def test_another_machine_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    PROFILE.check(tmp_path, replace(CONDITIONS, threads=2), ["0", "1"])
    assert "measured with threads 1, here it is 2" in caplog.text
