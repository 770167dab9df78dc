"""What Hydra's own handling of the command line leaves rough: `group=null`, and a Ctrl-C while it composes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(main: Callable[[], None]) -> None:
    """Call Hydra's `main`, ending without a traceback in both cases.

    Raises:
        SystemExit: with status 2 for `group=null`, 130 after a Ctrl-C.
    """
    null = null_group(sys.argv[1:])
    if null is not None:
        instead = f"leave it out, or use ~{null}" if null in ("experiment", "debug") else "name one of its options"
        print(f"ERROR: {null}=null names no option: {instead} (see --help)", file=sys.stderr)
        raise SystemExit(2)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def null_group(arguments: Sequence[str]) -> str | None:
    """The first config group that is set to null, which Hydra answers with an internal error."""
    for argument in arguments:
        group, equals, value = argument.partition("=")
        if group and equals and "null" in value.split(",") and (Path(__file__).parent / group).is_dir():
            return group
    return None
