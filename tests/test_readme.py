"""The README's commands run, shortened by overrides, and its Python examples do what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.schedule.library import SCHEDULES
from tests.engine.harness import assert_equal_outcomes, pipelined, plain_loop, settings_for

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = "tests.from_python"
LEFT = {"train": "summary.json", "plan": "plan.json", "profile": "profile.json"}
"""What a task leaves in its run directory."""
SHORT = (
    "steps=1 batch_size=6 microbatches=3 log_every=1 data.validation_batches=1 logger=none "
    "hydra.run.dir={directory} hydra.sweep.dir={directory}"
)


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Every command of the README that starts train.py."""
    return [command for command in started("python ", "torchrun ") if EXAMPLE not in command]


def stories() -> list[list[str]]:
    """The same commands, those that read what an earlier one left in its `hydra.run.dir=` together with it."""
    found: list[list[str]] = []
    for command in commands():
        for story in found:
            written = re.findall(r"hydra\.run\.dir=(\S+)", " ".join(story))
            if any(f"={directory}" in command for directory in written):
                story.append(command)
                break
        else:
            found.append([command])
    return found


def started(*programs: str) -> list[str]:
    """Every command of the README that begins with one of these words."""
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(programs)]


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a README command in this environment; what the README sets itself stays as it is."""
    words = shlex.split(command)
    given = {word.split("=")[0] for word in words if "=" in word}
    if not {"--help", "--cfg", EXAMPLE} & set(words):
        extra = [word for word in SHORT.format(directory=directory).split() if word.split("=")[0] not in given]
        words += extra
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        launcher[words[0]] + words[1:], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_there_are_commands_to_run():
    found = commands()
    assert any("-m" in shlex.split(command) for command in found)
    assert "python train.py schedule=1f1b model=gpt" in found
    assert len(found) >= 8


@pytest.mark.parametrize("story", stories(), ids="\n".join)
def test_command(story: list[str], tmp_path: Path):
    for number, command in enumerate(story):
        command = command.replace("=outputs/", f"={tmp_path}/")
        done = run(command, tmp_path / f"run{number}")
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if "--help" in command or "--cfg" in command:
            assert "schedule" in done.stdout
        else:
            (task,) = re.findall(r"task=(\w+)", command) or ["train"]
            assert list(tmp_path.rglob(LEFT[task])), done.stdout


def test_refusal_is_the_one_shown(tmp_path: Path):
    block = next(block for block in blocks("text") if block.startswith("$ python train.py"))
    command, answer = block.strip().splitlines()
    words = [sys.executable, *shlex.split(command)[2:], f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == answer


def test_output_shown_is_output():
    """What the product prints, pasted: no placeholder, and the parts that the text around it speaks of."""
    shown = blocks("text")
    assert all(len(block.splitlines()) > 1 for block in shown)
    assert "validation loss" in shown[0]
    assert "run directory:" in shown[0]
    assert any("Pareto" in block for block in shown)


def test_schedules_in_the_table_are_those_there_are():
    options = {file.stem for file in (ROOT / "conf" / "schedule").glob("*.yaml")}
    table = README[README.index("| schedule | idea | paper |") : README.index("There are two bubbles")]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == options
    assert options - {"file", "custom"} == set(SCHEDULES)


def python_block(words: str) -> str:
    """The README's Python that has these words in it."""
    (block,) = (block for block in blocks("python") if words in block)
    return block


LAUNCHERS = ("python", "torchrun --standalone --nproc-per-node 2")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_example_from_python(launcher: str, tmp_path: Path):
    """In one process and in two: the same lines, the same losses."""
    done = run(f"{launcher} -m {EXAMPLE}", tmp_path)
    assert done.returncode == 0, done.stderr
    steps, losses = zip(*re.findall(r"^step (\d+) \| loss ([\d.]+)$", done.stdout, flags=re.MULTILINE), strict=True)
    assert steps == ("20", "40", "60")
    assert [float(loss) for loss in losses] == pytest.approx([2.0718, 1.5775, 1.0792], abs=2e-3)


def test_python_shown_is_the_example():
    """Whatever the README shows of it is in the file that is run, line by line."""
    shown = [line for block in blocks("python") if "Pipeline(" in block for line in block.splitlines()]
    assert set(shown) <= set((ROOT / f"{EXAMPLE.replace('.', '/')}.py").read_text().splitlines())
    run_here = {f"{launcher} -m {EXAMPLE}" for launcher in LAUNCHERS}
    assert {command for command in started("python ", "torchrun ") if EXAMPLE in command} <= run_here


def test_schedule_example(capsys: pytest.CaptureFixture[str]):
    names: dict[str, object] = {}
    exec(python_block("def gpipe_lifo") + python_block("simulate(schedule"), names)
    printed = capsys.readouterr().out
    assert "gpipe_lifo: 3 ranks, 4 microbatches" in printed
    assert float(printed.splitlines()[-1]) == pytest.approx(1 / 3)  # (p-1)/(m+p-1), as GPipe's


def test_model_example():
    names: dict[str, object] = {}
    exec(python_block("def perceptron"), names)
    model = names["perceptron"](classes=5, size=8)
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(6, 3, 8, 8, generator=draw), torch.randint(0, 5, (6,), generator=draw)
    assert_equal_outcomes(
        pipelined(settings_for("1f1b", 3, 4, 6), model, inputs, targets), plain_loop(model, inputs, targets)
    )


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:pipeline|conf|models|data|tests)/[\w/]*\.?\w*)`", README)))
)
def test_files_named_exist(path: str):
    if "gpipe_lifo" not in path and "perceptron" not in path:
        assert (ROOT / path).exists()


def test_pictures_exist():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).stat().st_size > 10_000
