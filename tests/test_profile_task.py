"""`task=profile` as users give it, and what takes the file that it leaves."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from pipeline.training.profile_task import profile
from tests.command import Ran, shared, train
from tests.engine.samples import chain
from tests.engine.test_executor import LINEAR
from tests.training.harness import settings_to_train, vector_data

BUILDERS = partial(chain, [LINEAR] * 2), partial(vector_data, 4)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return shared(tmp_path_factory, "profile", "task=profile")


def test_a_profile_is_a_table_and_a_file(profiled: Ran):
    assert (profiled.status, profiled.err) == (0, "")
    assert "gpt: one microbatch of 1 x 16" in profiled.out
    assert "times: float32, one layer at a time, medians of 5 passes" in profiled.out
    assert all(len(line) <= 80 for line in profiled.out.splitlines()[:-1])
    written = json.loads(profiled.file("profile.json").read_text())
    assert [layer["name"] for layer in written["layers"]] == ["embedding", "block.0", "block.1", "head"]
    rows = {words[0]: words for words in map(str.split, profiled.out.splitlines()) if words}
    for layer in written["layers"]:
        assert rows[layer["name"]][1] == f"{1e3 * layer['forward']:.2f}"


def test_a_plan_takes_it(profiled: Ran, tmp_path: Path):
    path = profiled.file("profile.json")
    ran = train(tmp_path, "task=plan", f"profile={path}")
    assert (ran.status, ran.err) == (0, "")
    layers = json.loads(path.read_text())["layers"]
    found = json.loads(ran.file("plan.json").read_text())
    assert found["unit"] == "s"
    assert found["costs"]["forward"] == pytest.approx(
        [sum(layer["forward"] for layer in half) for half in (layers[:2], layers[2:])]
    )


def test_a_plan_cuts_by_it(profiled: Ran, tmp_path: Path):
    ran = train(tmp_path, "task=plan", f"profile={profiled.file('profile.json')}", "partition=auto")
    assert (ran.status, ran.err) == (0, "")
    found = json.loads(ran.file("plan.json").read_text())
    assert sum(found["layers"]) == 4
    assert f"partition     auto: {'+'.join(map(str, found['layers']))} layers" in ran.out
    told = re.search(r"simulated makespan ([\d.]+) ms, proven smallest", found["partition"])
    assert told is not None
    assert float(told[1]) / 1e3 == pytest.approx(found["makespan"], rel=0.01)


def test_ranks_of_a_launcher_cut_by_it_alike(profiled: Ran, tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = train(
        tmp_path, f"profile={profiled.file('profile.json')}", "partition=auto", "logger=none", launcher=launcher
    )
    assert ran.status == 0, ran.err
    assert ran.out.count("partition  auto: ") == 1
    assert sum(ran.summary["layers"]) == 4


def test_a_profile_of_something_else_is_one_line(profiled: Ran, tmp_path: Path):
    ran = train(tmp_path, f"profile={profiled.file('profile.json')}", "schedule=zb_auto", "precision=bf16")
    assert ran.status == 2
    (line,) = ran.errors
    assert "was measured with precision float32 and the run has float32, autocast bfloat16: make one with task" in line


def test_a_profile_is_made_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    settings = settings_to_train("1f1b", 2, 2, 4, 1, profile="old.json")
    with pytest.raises(ValueError, match=r"task=profile measures anew and profile=old.json is given: drop one"):
        profile(settings, tmp_path, BUILDERS, "gpt")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="measures in one process and a launcher started 4: use plain python"):
        profile(settings, tmp_path, BUILDERS, "gpt")
