"""Bytes and token files: windows, splits and what is refused."""

from __future__ import annotations

import importlib.metadata
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from data import text
from data.text import python_text, text_file
from data.tokens import tokens

SIZES = {"batch_size": 4, "seed": 0, "context": 16}


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A file whose byte at each place tells the place: a cycle of 251, coprime to every context used."""
    file = tmp_path / "letters.txt"
    file.write_bytes((np.arange(2000) % 251).astype(np.uint8).tobytes())
    return file


def write_tokens(folder: Path, train: np.ndarray, validation: np.ndarray) -> str:
    train.tofile(folder / "train.bin")
    validation.tofile(folder / "val.bin")
    return str(folder)


def test_python_text_is_real_source_split_by_file() -> None:
    data = python_text(**SIZES)
    train, validation = data.train.text.tokens, data.validation.text.tokens
    assert (data.kind, data.classes, data.units_per_sample) == ("text", 256, 16)
    assert 5 * len(validation) < len(train)
    assert len(train) + len(validation) > 10_000_000
    assert validation.tobytes()[:2000].decode()
    listed = [f for f in importlib.metadata.files("sympy") or [] if f.as_posix() == "sympy/core/expr.py"]
    source = listed[0].read_binary()
    assert (source in train.tobytes()) != (source in validation.tobytes())
    assert b"def test_" not in validation.tobytes()[:200_000]


def test_python_text_reads_nothing_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(files: list[Path]) -> np.ndarray:
        raise AssertionError("read")

    monkeypatch.setattr(text, "_read", refuse)
    data = python_text(**SIZES)
    with pytest.raises(AssertionError, match="read"):
        data.train.targets(0)


@pytest.mark.parametrize("listing", [None, [], importlib.metadata.PackageNotFoundError("sympy")])
def test_incomplete_sympy_is_refused(monkeypatch: pytest.MonkeyPatch, listing: object) -> None:
    def files(package: str) -> object:
        if isinstance(listing, Exception):
            raise listing
        return listing

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(
        ValueError, match="no complete installation of sympy: use `pip install --force-reinstall sympy`"
    ):
        python_text(**SIZES)


def test_batches_are_pure_and_targets_follow_inputs(letters: Path) -> None:
    build = pickle.loads(pickle.dumps(partial(text_file, path=str(letters), **SIZES)))
    one, two = build(), build()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    backwards = {step: (two.train.inputs(step), two.train.targets(step)) for step in reversed(range(9))}
    for step in range(9):
        inputs, targets = one.train.inputs(step), one.train.targets(step)
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, backwards[step][0])
        assert torch.equal(targets, backwards[step][1])
        assert torch.equal(targets, (inputs + 1) % 251)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one.train.inputs(0), one.train.inputs(1))


def test_seed_moves_training_and_leaves_validation(letters: Path) -> None:
    zero = text_file(path=str(letters), **SIZES)
    one = text_file(path=str(letters), **{**SIZES, "seed": 1})
    assert not torch.equal(zero.train.inputs(0), one.train.inputs(0))
    assert torch.equal(zero.validation.inputs(0), one.validation.inputs(0))


def test_an_epoch_covers_the_text_without_overlap_and_shifts_in_the_next(letters: Path) -> None:
    split = text_file(path=str(letters), batch_size=1, seed=0, context=16, validation_fraction=0.5).train
    windows = split.samples
    assert windows == (1000 - 16) // 16
    starts = [sorted(int(split._starts(e * windows + step)[0]) for step in range(windows)) for e in range(4)]
    assert all(set(np.diff(epoch)) == {16} for epoch in starts)
    assert len({epoch[0] for epoch in starts}) > 1
    assert all(0 <= epoch[0] < 16 for epoch in starts)
    assert all(epoch[-1] + 16 < 1000 for epoch in starts)


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 47, 48, 49])
def test_short_texts_stay_within_their_bounds(tmp_path: Path, length: int) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(range(length)) + bytes(100))
    split = text_file(path=str(file), **SIZES, validation_fraction=100 / (length + 100)).train
    for step in range(20):
        inputs, targets = split.inputs(step), split.targets(step)
        assert torch.equal(targets, inputs + 1)
        assert targets.max() < length


def test_split_by_position(letters: Path) -> None:
    data = text_file(path=str(letters), **SIZES, validation_fraction=0.25)
    raw = letters.read_bytes()
    assert data.train.text.tokens.tobytes() == raw[:1500]
    assert data.validation.text.tokens.tobytes() == raw[1500:]


def test_folder_joins_matching_files_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    contents = {"b.py": b"b", "a.py": b"a", "deep/c.py": b"c", "d.txt": b"d", ".git/e.py": b"e", ".f.py": b"f"}
    for name, byte in contents.items():
        (tmp_path / name).write_bytes(byte * 100)
    data = text_file(path=str(tmp_path), **SIZES, pattern="*.py")
    joined = data.train.text.tokens.tobytes() + data.validation.text.tokens.tobytes()
    assert joined == b"a" * 100 + b"b" * 100 + b"c" * 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "no/where"}, "finds nothing at no/where: use the path of an existing file or folder"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1, got 1.0: use 0.1"),
        ({"context": 1800}, r"has 1800 tokens, fewer than context \+ 1 \(1801\): use a longer text or context=1799"),
        ({"context": 200}, r"the validation part of .* has 200 tokens, fewer than context \+ 1 \(201\)"),
        ({"batch_size": 0}, "positive batch_size, got 0"),
    ],
)
def test_bad_text_is_refused(letters: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_file(**{"path": str(letters), **SIZES, **change})


def test_folder_without_a_match_and_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"finds no file named \*.py in .*: use another folder or pattern"):
        text_file(path=str(tmp_path), **SIZES, pattern="*.py")
    (tmp_path / "empty.py").touch()
    with pytest.raises(ValueError, match=r"has 0 tokens, fewer than context \+ 1 \(17\): use a longer text$"):
        text_file(path=str(tmp_path), **SIZES)


def test_bytes_stand_for_text(letters: Path) -> None:
    codec = text_file(path=str(letters), **SIZES).codec
    assert codec is not None
    assert codec.encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert codec.decode([97, 0xC3, 0xA9]) == "a\u00e9"
    assert codec.decode([97, 0xC3]) == "a\ufffd", "half a character"


def test_token_files_in_nanogpts_form(tmp_path: Path) -> None:
    path = write_tokens(tmp_path, np.arange(3000, dtype=np.uint16), np.arange(100, dtype=np.uint16))
    data = tokens(path=path, **SIZES, vocabulary=3000)
    inputs = torch.cat([data.train.inputs(step) for step in range(50)])
    assert torch.equal(torch.cat([data.train.targets(step) for step in range(50)]), inputs + 1)
    assert inputs.max() > 2900
    assert data.classes == 3000
    assert data.codec is None, "only their writer knows what they stand for"
    assert data.validation.inputs(0).max() < 100


def test_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    train = np.full(400, 7, dtype=np.uint16)
    train[200] = 50256
    data = tokens(path=write_tokens(tmp_path, train, train[:100]), **SIZES, vocabulary=50_000)
    message = r"train.bin holds token 50256, outside a vocabulary of 50000: use vocabulary=50257"
    with pytest.raises(ValueError, match=message):
        [data.train.targets(step) for step in range(10)]


def test_wrong_token_files_are_refused(tmp_path: Path) -> None:
    build = partial(tokens, path=str(tmp_path), **SIZES, vocabulary=300)
    good = np.arange(300, dtype=np.uint16)
    with pytest.raises(ValueError, match=r"finds no file .*train.bin: use a folder with train.bin and val.bin"):
        build()
    good.tofile(tmp_path / "train.bin")
    (tmp_path / "val.bin").write_bytes(good.tobytes()[:-1])
    with pytest.raises(ValueError, match=r"val.bin has 599 bytes, no whole number of uint16: write it with"):
        build()
    good.astype(np.int32).tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match=r"val.bin looks like 32-bit integers, not uint16: write it with"):
        build()
    with (tmp_path / "val.bin").open("wb") as stream:
        np.save(stream, good)
    with pytest.raises(ValueError, match=r"val.bin is a .npy file, not raw uint16: write it with"):
        build()
    good[:10].tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match=r"val.bin has 10 tokens, fewer than context \+ 1 \(17\)"):
        build()
