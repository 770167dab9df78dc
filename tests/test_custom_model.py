"""`model=custom` as users start it: their module is in the current folder, which ranks must find too."""

from __future__ import annotations

from pathlib import Path

from tests import command

MODULE = """
from torch import nn

def build(width=8, classes=36, size=8):
    hidden = nn.Linear(width, width)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, width), hidden, nn.ReLU(inplace=True), hidden,
                         nn.Linear(width, classes))

def class_number(outputs, targets):
    return (outputs[:, 0] - targets).abs().mean()
"""
WORDS = [
    *("model=custom", "model.target=mine:build", "data=synthetic_images", "data.size=8", "data.classes=36"),
    *("batch_size=4", "microbatches=4", "steps=2", "log_every=1", "data.validation_batches=1", "logger=none"),
]


def run(folder: Path, *more: str) -> command.Ran:
    (folder / "mine.py").write_text(MODULE)
    words = [str(command.ROOT / "train.py"), f"hydra.run.dir={folder / 'run'}", *WORDS, *more]
    with command.launched(words, folder) as process:
        out, err = process.communicate(timeout=command.LIMIT)
    return command.Ran(process.returncode, out, err, folder / "run")


def test_it_trains_in_two_processes(tmp_path: Path) -> None:
    ran = run(tmp_path, "model.arguments.width=6", "model.arguments.classes=1", "model.loss=mine:class_number")
    assert ran.status == 0, ran.err
    assert ran.summary["parameters"] == 193 * 6 + 7 * 6 + 7
    assert 5 < ran.summary["train_loss"] < 30, "how far from a class of 0 to 35"
    assert ran.summary["model"] == "custom"


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    ran = run(tmp_path, "model.target=mine:bild")
    assert (ran.status, ran.out) == (2, "")
    (line,) = ran.errors
    assert line.startswith("ERROR: model.target=mine:bild can't be imported (module 'mine' has no attribute 'bild')")
