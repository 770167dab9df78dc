"""A rank's log: everything into the run's log file, warnings on stderr as well, each line naming the rank."""

from __future__ import annotations

import logging
from pathlib import Path

# Set on a record that the launcher shows by itself: it goes to the file only.
SHOWN_BY_LAUNCHER = "shown_by_launcher"


class _RankFormatter(logging.Formatter):
    """Prefixes every line of a record, a traceback's too, so that one rank can be grepped out of the file."""

    def __init__(self, rank: int, layout: str) -> None:
        super().__init__(layout)
        self._prefix = f"[rank {rank}]"

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(self._prefix + line for line in super().format(record).splitlines())


def log_as_rank(rank: int, log_file: Path | None) -> None:
    """Send this process's log records (INFO and above) and Python warnings to `log_file`, warnings also to stderr.

    Replaces the root logger's handlers. Ranks append to the same file: a record is one write, so lines don't mix.
    """
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.setFormatter(_RankFormatter(rank, " %(levelname)s %(name)s: %(message)s"))
    console.addFilter(lambda record: not hasattr(record, SHOWN_BY_LAUNCHER))
    handlers: list[logging.Handler] = [console]
    if log_file is not None:
        file = logging.FileHandler(log_file, mode="a", encoding="utf-8")
        file.setFormatter(_RankFormatter(rank, "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
        handlers.append(file)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
