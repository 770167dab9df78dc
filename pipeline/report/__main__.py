"""`python -m pipeline.report DIR [DIR...]`: compare runs that have been."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.report.write import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a report of the directories that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.report", description="Compare runs and sweeps.")
    parser.add_argument("places", metavar="DIR", nargs="+", type=Path, help="a run directory, or one that holds some")
    parser.add_argument("--baseline", metavar="NAME|INDEX", help="the row to compare with; else the first")
    parser.add_argument("--target-loss", metavar="X", type=float, help="else the worst that a finished run ends with")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the files go; else into the first DIR")
    given = parser.parse_args(arguments)
    try:
        write_report(
            given.places,
            given.out or given.places[0],
            Console(),
            baseline=given.baseline,
            target_loss=given.target_loss,
        )
    except (ValueError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
