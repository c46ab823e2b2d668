"""The results of the experiment, cell by cell, in one file that a later run goes on with.

A cell is one variant of one workload. Rank 0 alone reads and writes; what it reads, it tells the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spindle.artifact import write_atomically

_MOST_BEGINNINGS = 2


class Cells:
    """What was measured so far. Every change is written at once, the file whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: dict[str, Any] = {"about": {}, "workloads": {}, "cells": {}, "begun": {}}
        if path.exists():
            self._data |= json.loads(path.read_text(encoding="utf-8"))

    def done(self) -> set[str]:
        """Cells with a result. One that was begun twice and never ended is a result, too: it ends the job."""
        for cell, times in list(self._data["begun"].items()):
            if times >= _MOST_BEGINNINGS:
                self.finish(cell, {"error": f"the job ended in this cell {times} times"})
        return set(self._data["cells"])

    def measured(self) -> dict[str, Any]:
        """The results of cells that did not end with an error."""
        return {name: result for name, result in self._data["cells"].items() if "error" not in result}

    def begin(self, cell: str) -> None:
        self._data["begun"][cell] = self._data["begun"].get(cell, 0) + 1
        self._write()

    def finish(self, cell: str, result: dict[str, Any]) -> None:
        self._data["begun"].pop(cell, None)
        self._data["cells"][cell] = result
        self._write()

    def forget(self, cell: str) -> None:
        """A cell that ended without a result of its own."""
        self._data["begun"].pop(cell, None)
        self._write()

    def describe(self, about: dict[str, Any]) -> None:
        """What it was measured on."""
        self._data["about"] = about
        self._write()

    def describe_workload(self, workload: str, facts: dict[str, Any]) -> None:
        self._data["workloads"].setdefault(workload, {}).update(facts)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self._data, indent=1) + "\n")
