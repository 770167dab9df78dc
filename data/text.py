"""Text as bytes, vocabulary 256: real Python source, or any file or folder of the user's."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import numpy as np

from data.dataset import Data, require_positive
from data.windows import Text, Tokens, Windows

BYTES = 256
# One file in ten, spread over the sorted list, so that both splits hold every corner of the package.
HELD_OUT_EVERY = 10


def python_text(*, batch_size: int, seed: int, context: int) -> Data:
    """Python source as bytes: the modules of sympy (which torch requires), split by file; 15 MB to train on.

    The bytes are the same on every machine for one version of sympy. Read on first use, in a fifth of a second.
    """
    require_positive(batch_size=batch_size, context=context)
    files = _sources("sympy")
    held_out = [file for index, file in enumerate(files) if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train = [file for index, file in enumerate(files) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    texts = (_text("sympy's training files", train), _text("sympy's held-out files", held_out))
    return _data(*texts, batch_size=batch_size, seed=seed, context=context)


def text_file(
    *, path: str, batch_size: int, seed: int, context: int, validation_fraction: float = 0.1, pattern: str = "*"
) -> Data:
    """Bytes of a file, or of a folder's files that match `pattern`, sorted and joined; the last tenth validates.

    Hidden files and folders are left out. A missing, empty or too short text is a ValueError.
    """
    require_positive(batch_size=batch_size, context=context)
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, got {validation_fraction}: use 0.1")
    files = _files(Path(path), pattern)
    length = sum(file.stat().st_size for file in files)
    cut = length - int(length * validation_fraction)
    read = partial(_read, files)
    train = Text(f"the training part of {path}", cut, partial(_part, read, 0, cut))
    validation = Text(f"the validation part of {path}", length - cut, partial(_part, read, cut, length))
    return _data(train, validation, batch_size=batch_size, seed=seed, context=context)


def _data(train: Text, validation: Text, *, batch_size: int, seed: int, context: int) -> Data:
    return Data(
        train=Windows.shuffled(train, context, batch_size, seed),
        validation=Windows.fixed(validation, context, batch_size),
        kind="text",
        units_per_sample=context,
        classes=BYTES,
        codec=Bytes(),
    )


@dataclass(frozen=True)
class Bytes:
    """Text as its UTF-8 bytes."""

    def encode(self, text: str) -> list[int]:
        """A number below 256 for each byte."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; what is no UTF-8 becomes the replacement character."""
        return bytes(tokens).decode(errors="replace")


def _sources(package: str) -> list[Path]:
    """A distribution's own list of its modules without tests, sorted by name: the same list on every machine."""
    try:
        listed = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    modules = {file.as_posix(): file for file in listed if _is_source(package, file)}
    files = [Path(str(modules[name].locate())) for name in sorted(modules)]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"python_text finds no complete installation of {package}: use `pip install --force-reinstall {package}`"
        )
    return files


def _is_source(package: str, file: PurePath) -> bool:
    return file.suffix == ".py" and file.parts[0] == package and "tests" not in file.parts


def _files(path: Path, pattern: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"text_file finds nothing at {path}: use the path of an existing file or folder")
    visible = (file for file in path.rglob(pattern) if file.is_file() and not _is_hidden(file.relative_to(path)))
    files = sorted(visible, key=lambda file: file.as_posix())
    if not files:
        raise ValueError(f"text_file finds no file named {pattern} in {path}: use another folder or pattern")
    return files


def _is_hidden(file: PurePath) -> bool:
    return any(part.startswith(".") for part in file.parts)  # such as .git's binary files


def _text(name: str, files: list[Path]) -> Text:
    return Text(name, sum(file.stat().st_size for file in files), partial(_read, files))


def _read(files: list[Path]) -> Tokens:
    if len(files) == 1:
        return np.memmap(files[0], dtype=np.uint8, mode="r")
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def _part(read: Callable[[], Tokens], start: int, stop: int) -> Tokens:
    return read()[start:stop]
