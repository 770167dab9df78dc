"""The files of one run directory. One that is damaged or missing is a line said, never the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


class RunFiles:
    """Reads a run directory's files; `problems` has a line for each that could not be read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []

    def mapping(self, name: str, *, expected: bool = False) -> dict[str, Any]:
        """A JSON object; empty where the file is not there, or holds none."""
        value = self._read(name, json.loads, "JSON", expected)
        if value is not None and not isinstance(value, dict):
            self.problems.append(f"{self.directory / name} holds no JSON object")
        return value if isinstance(value, dict) else {}

    def lines(self, name: str, *, expected: bool = False) -> list[dict[str, Any]]:
        """One JSON object a line; the others are counted in `problems`. A killed run's last line may be cut."""
        rows, lost = [], 0
        for line in self._read(name, str.splitlines, "text", expected) or ():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            lost += not isinstance(row, dict)
            rows += [row] if isinstance(row, dict) else []
        if lost:
            self.problems.append(f"{self.directory / name}: {lost} of {lost + len(rows)} lines are no JSON objects")
        return rows

    def yaml(self, name: str, *, expected: bool = False) -> Any:
        """What a YAML file holds; None where it is not there."""
        return self._read(name, yaml.safe_load, "YAML", expected)

    def _read(self, name: str, parse: Callable[[str], Any], kind: str, expected: bool) -> Any:
        path = self.directory / name
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if expected:
                self.problems.append(f"{path} is not there")
        except OSError as error:
            self.problems.append(f"{path} cannot be read: {error.strerror}")
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            self.problems.append(f"{path} is no {kind}: {' '.join(str(error).split())}")
        return None
