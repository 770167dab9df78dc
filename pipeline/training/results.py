"""What a run that trains nothing leaves: its result on the terminal and in summary.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.training.messages import Evaluated, Evaluating, Generated
from pipeline.training.progress import rate_text
from pipeline.training.recorder import Status, plain, write_json
from pipeline.training.trainer import Codec

Take = Callable[[Any], Mapping[str, object]]
"""Prints or writes a rank's message, and gives what the summary says of it."""


class Results:
    """Writes the run directory of an evaluation or a generation.

    Args:
        directory: the run directory.
        facts: what is known before the run, for summary.json.
        take: what becomes of the ranks' message.
    """

    def __init__(self, directory: Path, facts: Mapping[str, object], take: Take) -> None:
        self._directory = directory
        self._summary = dict(facts)
        self._take = take

    def start(self) -> None:
        """Make the run directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, message: object) -> None:
        """Take the result."""
        self._summary |= self._take(message)

    def finish(self, status: Status, error: str | None = None, *, steps_done: int | None = None) -> None:
        """Write summary.json."""
        summary = {"status": status, "error": error, **self._summary}
        write_json(self._directory / "summary.json", plain(summary))


def show_metrics(message: Evaluated | Evaluating) -> Mapping[str, object]:
    """Print what held-out samples say, or how many of them are done."""
    if isinstance(message, Evaluating):
        print(f"{message.begun:,} of {message.samples:,} held-out samples", flush=True)
        return {}
    rate = message.samples / message.seconds
    print(f"{message.samples:,} held-out samples in {message.seconds:.1f} s ({rate_text(rate)} samples/s)")
    for name, value in message.metrics.items():
        share = name.endswith("accuracy")
        print(f"{name.replace('_', ' '):14} {f'{100 * value:.2f} %' if share else f'{value:.4f}'}")
    return {**message.metrics, "samples": message.samples, "samples_per_second": rate, "seconds": message.seconds}


def show_text(codec: Codec, prompt: str, directory: Path, message: Generated) -> Mapping[str, object]:
    """Print the text with its prompt, and write it to generated.txt."""
    text = prompt + codec.decode(message.tokens)
    (directory / "generated.txt").write_text(text, encoding="utf-8")
    print(text)
    rate = len(message.tokens) / message.seconds
    return {"text": text, "tokens": len(message.tokens), "tokens_per_second": rate, "seconds": message.seconds}
