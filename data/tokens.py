"""Token files in nanoGPT's form: raw uint16, train.bin and val.bin in one folder, mapped into memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from data.dataset import Data, require_positive
from data.windows import Text, Tokens, Windows

TOKEN = np.dtype("<u2")
PROBED_TOKENS = 4096


def tokens(*, path: str, batch_size: int, seed: int, context: int, vocabulary: int) -> Data:
    """The tokens of path/train.bin and path/val.bin, as nanoGPT's prepare.py writes them.

    A missing, too short or wrongly typed file is a ValueError, as is a batch with a token outside the vocabulary.
    """
    require_positive(batch_size=batch_size, context=context, vocabulary=vocabulary)
    train, validation = (_text(Path(path) / name) for name in ("train.bin", "val.bin"))
    return Data(
        train=Windows.shuffled(train, context, batch_size, seed, vocabulary=vocabulary),
        validation=Windows.fixed(validation, context, batch_size, vocabulary=vocabulary),
        kind="text",
        units_per_sample=context,
        classes=vocabulary,
    )


def _text(file: Path) -> Text:
    if not file.is_file():
        raise ValueError(f"tokens finds no file {file}: use a folder with train.bin and val.bin (raw uint16)")
    size = file.stat().st_size
    if size % TOKEN.itemsize:
        raise ValueError(f"{file} has {size} bytes, no whole number of uint16: write it with array.astype('uint16')")
    _refuse_other_types(file)
    return Text(str(file), size // TOKEN.itemsize, partial(_map, file))


def _refuse_other_types(file: Path) -> None:
    """Other types read as uint16 without any error, and train on nonsense."""
    with file.open("rb") as stream:
        start = stream.read(PROBED_TOKENS * TOKEN.itemsize)
    if start.startswith(b"\x93NUMPY"):
        raise ValueError(f"{file} is a .npy file, not raw uint16: write it with array.astype('uint16').tofile(...)")
    words = np.frombuffer(start, dtype=TOKEN)
    if len(words) > 1 and words[0::2].any() and not words[1::2].any():
        raise ValueError(f"{file} looks like 32-bit integers, not uint16: write it with array.astype('uint16')")


def _map(file: Path) -> Tokens:
    return np.memmap(file, dtype=TOKEN, mode="r")
