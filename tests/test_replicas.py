"""`dp=2` as users start it: four processes, and what is said when one of them is killed."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import command
from tests.test_hang import kill_rank

pytestmark = pytest.mark.timeout(200)
REPLICAS = ["pp=2", "dp=2", "microbatches=2", "logger=none"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]


def logged(ran: command.Ran, name: str) -> list[Any]:
    rows = map(json.loads, ran.file("metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_four_processes_train_as_one_pipeline_does(tmp_path: Path) -> None:
    """A tied embedding, dropout, clipping: the same numbers as one rank that gets all four microbatches."""
    shared = ["precision=fp64", "model.tie_embeddings=true", "model.dropout=0.1", "partition=parameters"]
    folders = [tmp_path / name for name in ("replicas", "alone")]
    for folder in folders:
        folder.mkdir()
    found = command.train(folders[0], *REPLICAS, *shared)
    alone = command.train(folders[1], "pp=1", "logger=none", "launch=in_process", *shared)
    assert (found.status, alone.status) == (0, 0), found.err + alone.err
    for name in ("loss", "gradient_norm", "validation_loss"):
        assert logged(found, name) == pytest.approx(logged(alone, name), rel=1e-11)
    summary = found.summary
    assert (summary["pp"], summary["dp"], summary["steps_done"]) == (2, 2, 3)
    assert [(rank["rank"], rank["stages"]) for rank in summary["ranks"]] == [(0, [0]), (1, [1]), (2, [0]), (3, [1])]
    assert [row["rank"] for row in summary["idle"]] == [0, 1, 2, 3]
    assert "1f1b, pp=2, dp=2, 2 microbatches" in found.out
    assert len(alone.summary["ranks"]) == 1


def test_a_killed_rank_of_the_second_replica_is_named_under_torchrun(tmp_path: Path) -> None:
    ran = command.disturbed(tmp_path, partial(kill_rank, 3), *REPLICAS, launcher=TORCHRUN)
    assert ran.status != 0
    assert ran.left == set()
    assert ran.seconds < 30
    assert ran.summary["error"] == "RankFailure: rank 3 gives no sign"
    assert [line.partition("  ")[0] for line in ran.errors if re.match(r"rank \d  \S", line)] == [
        f"rank {rank}" for rank in range(4)
    ]
    assert "\nrank 3  gives no sign\n" in ran.err
