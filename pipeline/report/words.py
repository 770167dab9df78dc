"""Numbers as people read them."""

from __future__ import annotations

from typing import NamedTuple


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}" if abs(value) >= 1e-9 else "0"


def percent(fraction: float) -> str:
    """With one decimal."""
    return f"{100 * fraction + 0.0:.1f} %"


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


class ByteUnit(NamedTuple):
    """A unit that a group of sizes is shown in."""

    name: str
    bytes: float

    @classmethod
    def of(cls, largest: float) -> ByteUnit:
        """The one in which the largest size has one to four digits before the point."""
        names = ("bytes", "KiB", "MiB", "GiB", "TiB")
        at = 0
        while largest >= 1000 * 1024**at and at < len(names) - 1:
            at += 1
        return cls(names[at], float(1024**at))
