from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from tests.benchmarks.alternation import TOLERANCE
from tests.benchmarks.engine_vs_torch import main
from tests.benchmarks.engines import error
from tests.benchmarks.table import Row, geometric_mean, table


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    file = tmp_path_factory.mktemp("benchmark") / "rows.json"
    rows = main(
        ["--quick", "--models", "tiny", "--schedules", "1f1b", "interleaved_zb", "--rounds", "2", "--json", str(file)]
    )
    assert json.loads(file.read_text()) == rows
    return rows


def test_both_engines_do_the_plain_loops_work(measured: list[Row]) -> None:
    assert [(row["model"], row["schedule"], row["torch"]) for row in measured] == [
        ("tiny", "1f1b", "1F1B"),
        ("tiny", "interleaved_zb", "InterleavedZeroBubble"),
    ]
    for row in measured:
        assert 0 <= float(row["error"]) <= TOLERANCE
        assert sum(map(int, str(row["cut"]).split("+"))) == 6


def test_a_rows_ratios_are_those_of_its_figures(measured: list[Row]) -> None:
    for row in measured:
        ours, theirs = float(row["seconds"]), float(row["torch_seconds"])
        assert 0 < float(row["throughput_ratio"]) < 100
        assert float(row["efficiency"]) * ours == pytest.approx(float(row["torch_efficiency"]) * theirs)
        assert float(row["memory_ratio"]) == pytest.approx(float(row["memory_mb"]) / float(row["torch_memory_mb"]))


@dataclass
class Fixed:
    """An engine after its step."""

    gradient: Tensor
    loss: Tensor | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters["weight"] = nn.Parameter(torch.zeros_like(self.gradient))
        self.parameters["weight"].grad = self.gradient

    def step(self) -> None:
        pass


def test_an_error_is_told_in_terms_of_the_largest_entry() -> None:
    expected = Fixed(torch.tensor([4.0, -8.0]), loss=torch.tensor(2.0))
    assert error(Fixed(torch.tensor([4.0, -8.0]), loss=torch.tensor(2.0)), expected) == 0
    assert error(Fixed(torch.tensor([5.0, -8.0])), expected) == pytest.approx(1 / 8)
    assert error(Fixed(torch.tensor([4.0, -8.0]), loss=torch.tensor(1.0)), expected) == pytest.approx(1 / 2)


def test_a_table_has_a_line_a_row_and_shows_small_numbers() -> None:
    lines = table([{"name": "a", "error": 2e-7, "ratio": 1.25}, {"name": "long", "error": 0.0, "ratio": 10.0}])
    assert lines.splitlines() == ["name    error   ratio", "   a  2.0e-07   1.250", "long    0.000  10.000"]


def test_a_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
