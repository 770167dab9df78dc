"""What a process started inside a block takes over from this one: environment variables and the start method."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator


@contextlib.contextmanager
def inherited(**variables: str) -> Iterator[None]:
    """Environment variables for a process started inside the block."""
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def inheritable_start_method() -> Iterator[None]:
    """A child takes over the global start method's name; joblib's ("loky") means nothing there and would end it."""
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None or method in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method(None, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
