"""What every benchmark does with its rows: the options it takes, the table it prints, the file it leaves."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, str | int | float]


def parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Takes --quick, which `quick` explains, and --json; the description is a module's docstring."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, help="write the rows to this file as well")
    return made


def publish(rows: Sequence[Row], file: Path | None) -> None:
    """Print the rows, and write them to the file asked for."""
    print(table(rows), flush=True)
    write(rows, file)


def write(rows: Sequence[Row], file: Path | None) -> None:
    """As JSON, to the file asked for."""
    if file is not None:
        file.write_text(json.dumps(rows, indent=2) + "\n")


def table(rows: Sequence[Row]) -> str:
    """The rows, one a line, numbers to the right."""
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: str | int | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
