"""The program's own pages: --help and --cfg."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from conf import schema
from conf.help import fields_help
from pipeline.training.settings import described
from tests.conf.compose import groups, options

ROOT = Path(__file__).parents[2]


def page(*arguments: str) -> str:
    """What `python train.py` prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_help_lists_every_group_option_and_field() -> None:
    text = page("--help")
    for group in groups():
        listed = re.search(rf"^  {group} +(.+)$", text, flags=re.MULTILINE)
        assert listed is not None, group
        assert listed[1].split(", ") == options(group)
    for field in dataclasses.fields(schema.Config):
        if field.name not in schema.GROUPS:
            name = "costs.forward" if field.name == "costs" else field.name
            row = re.search(rf"^  {name}=\S+ +(.+)$", text, flags=re.MULTILINE)
            assert row is not None, field.name
            assert row[1] == field.metadata["help"] or field.name == "costs"
    for targets in schema.SCHEMAS.values():
        for target in targets.values():
            for field in dataclasses.fields(target):
                assert field.metadata["help"] in text
    for name in ("optimizer.learning_rate", "schedule.stages_per_rank", "logger.mode", "model.context", "data.path"):
        assert f"  {name}=" in text
    assert "${" not in text


def test_cfg_job_shows_the_composed_config() -> None:
    text = page("--cfg", "job", "schedule=interleaved_1f1b", "model=resnet152")
    shown = OmegaConf.create(text)
    assert shown.schedule.stages_per_rank == 2
    assert shown.model.depth == 152
    assert set(shown) == {field.name for field in dataclasses.fields(schema.Config)}
    assert page("--cfg", "job", "--resolve", "--package", "model") == "# @package model\n" + (
        "weights: null\nfresh: []\nlayers: 4\nwidth: 128\nheads: 4\ncontext: 128\nvocabulary: 256\n"
        "dropout: 0.0\ntie_embeddings: true\n"
    )


@dataclasses.dataclass
class Small:
    size: int = described(3, "how big")
    classes: int = described("${oc.select:data.classes,10}", "how many")


@dataclasses.dataclass
class Large(Small):
    path: str | None = described(None, "where")
    fast: bool = described(True, "how fast")


def test_a_field_that_only_some_options_have_names_them() -> None:
    lines = [" ".join(line.split()) for line in fields_help({"data": {"small": Small, "large": Large}}).splitlines()]
    assert lines[-4:] == [
        "data.size=3 how big",
        "data.classes=10 how many",
        "data.path=null where (large)",
        "data.fast=true how fast (large)",
    ]
