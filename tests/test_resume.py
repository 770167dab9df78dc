"""Checkpoints as users meet them: `save_every=`, and `resume=` with another pipeline, on the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.command import Ran, shared, train

STEPS = 4
WORDS = "the quick brown fox jumps over the lazy dog\n" * 80


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on two processes with a checkpoint after two steps and at its end."""
    ran = shared(tmp_path_factory, "saved", f"steps={STEPS}", "save_every=2", "logger=none", "precision=fp64")
    assert ran.status == 0, ran.err
    return ran


def losses(ran: Ran) -> dict[int, float]:
    rows = map(json.loads, ran.file("metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def checkpoint(ran: Ran, step: int) -> Path:
    return ran.file("checkpoints") / f"step-{step:06}"


def test_another_pipeline_goes_on_with_the_same_run(saved, tmp_path):
    arguments = ["schedule=interleaved_1f1b", "schedule.stages_per_rank=2", f"steps={STEPS}"]
    ran = train(tmp_path, *arguments, f"resume={checkpoint(saved, 2)}", "logger=none", "precision=fp64")
    assert ran.status == 0, ran.err
    found, expected = losses(ran), losses(saved)
    assert list(found) == [3, 4]
    assert f"INFO: goes on from step 2: {checkpoint(saved, 2)}" in ran.errors
    assert [found[step] for step in (3, 4)] == pytest.approx([expected[step] for step in (3, 4)], rel=1e-12)
    assert (ran.summary["steps_done"], saved.summary["steps_done"]) == (4, 4)


def test_each_rank_wrote_its_own_layers(saved):
    manifest = json.loads((checkpoint(saved, STEPS) / "manifest.json").read_text())
    held = {
        file: {name.split(".")[0] for name, (at, *_) in manifest["tensors"]["model"].items() if at == file}
        for file in manifest["files"]
    }
    assert held["model-00001-of-00002.safetensors"] == {"embedding", "block"}
    assert held["model-00002-of-00002.safetensors"] == {"block", "head"}
    assert manifest["config"]["choices"]["model"] == "gpt"


def test_held_out_text_is_evaluated(saved, tmp_path):
    """The last tenth of a file's 3520 bytes: 21 windows of 16 tokens, and the last of the batches of four has one."""
    (tmp_path / "words.txt").write_text(WORDS)
    text = ["data=text_file", "data.path=words.txt"]
    ran = train(tmp_path, "task=evaluate", f"resume={saved.directory}", *text, "logger=none", "precision=fp64")
    assert ran.status == 0, ran.err
    summary = ran.summary
    assert (summary["status"], summary["task"], summary["samples"], summary["steps_done"]) == (
        "finished",
        "evaluate",
        21,
        4,
    )
    assert summary["checkpoint"] == str(checkpoint(saved, STEPS))
    assert math.log(summary["perplexity"]) == pytest.approx(summary["loss"])
    assert ran.out.splitlines()[1:] == [
        f"loss           {summary['loss']:.4f}",
        f"perplexity     {summary['perplexity']:.4f}",
    ]
    assert not ran.file("metrics.jsonl").exists()


def test_a_text_goes_on(saved, tmp_path):
    """The same from two processes as from one."""
    texts = []
    for number, more in enumerate((["pp=2"], ["launch=in_process", "pp=1"])):
        (folder := tmp_path / str(number)).mkdir()
        prompt = ["prompt='def '", "max_new_tokens=20", "seed=1"]
        ran = train(
            folder, "task=generate", f"resume={saved.directory}", *prompt, *more, "logger=none", "precision=fp64"
        )
        assert ran.status == 0, ran.err
        text = ran.file("generated.txt").read_text()
        assert text.startswith("def ")
        assert ran.summary["text"] == text
        assert ran.out == f"{text}\n"
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "is at step 4, and steps=3 leaves nothing to train: use steps=8"),
        (["steps=8", "model.width=64"], "use model=gpt model.layers=2 model.width=32"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(saved, tmp_path, arguments, message):
    ran = train(tmp_path, f"resume={saved.directory}", "logger=none", *arguments)
    (error,) = ran.errors
    assert ran.status == 2
    assert error.startswith("ERROR: ")
    assert message in error
