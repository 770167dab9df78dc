"""Data with an end, and the jobs that evaluate it or go on with its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.training.job import Job, run_job
from tests.engine.samples import images, text


@dataclass(frozen=True)
class Whole:
    """All samples of a split, in batches that go round."""

    everything: tuple[Tensor, Tensor]
    batch_size: int

    @property
    def samples(self) -> int:
        return len(self.everything[0])

    def inputs(self, step: int, samples: slice = slice(None)) -> Tensor:
        return self._batch(0, step)[samples]

    def targets(self, step: int) -> Tensor:
        return self._batch(1, step)

    def _batch(self, part: int, step: int) -> Tensor:
        places = torch.arange(step * self.batch_size, (step + 1) * self.batch_size) % self.samples
        return self.everything[part][places]


class Letters:
    """32 characters from the space on."""

    def encode(self, words: str) -> list[int]:
        return [ord(letter) - 32 for letter in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(32 + token) for token in tokens)


@dataclass(frozen=True)
class WholeData:
    """A data set with `samples` held-out samples."""

    train: Whole
    validation: Whole
    kind: str
    classes: int
    units_per_sample: int = 8
    codec: Letters | None = None


def texts(batch_size: int, samples: int) -> WholeData:
    split = Whole(text(samples, 7), batch_size)
    return WholeData(split, split, "text", 32, codec=Letters())


def pictures(batch_size: int, samples: int) -> WholeData:
    split = Whole(images(samples, 32), batch_size)
    return WholeData(split, split, "images", 10, 1)


class Record:
    """Keeps what the ranks say."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def start(self) -> None:
        """Nothing to prepare."""

    def __call__(self, message: object) -> None:
        self.messages.append(message)

    def finish(self, status: str, error: str | None = None, *, steps_done: int | None = None) -> None:
        assert status == "finished"


def result_of(job: Job, folder: Path) -> Any:
    """The one message of a job that trains nothing."""
    record = Record()
    run_job(job, record, folder / "train.log")
    (message,) = record.messages
    return message


def text_builders(build_model: Any, batch_size: int, samples: int) -> tuple[Any, Any]:
    return build_model, partial(texts, batch_size, samples)


def picture_builders(build_model: Any, batch_size: int, samples: int) -> tuple[Any, Any]:
    return build_model, partial(pictures, batch_size, samples)
