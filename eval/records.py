"""Records of a run, one a line, that are only ever added to: a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any


class Records:
    """A file whose first line says what run it is of, and every other one what was measured.

    A line that was being written when the run was interrupted is cut off. A file of nothing but the first line is of
    any run.

    Args:
        path: The file; its folder is made.
        run: What all its records have in common, as plain values.
        names: The entries of a record that tell it from every other one.

    Raises:
        ValueError: If the file is of another run, or of another kind; the message says what differs. It is as it was.
    """

    def __init__(self, path: Path, run: dict[str, Any], names: tuple[str, ...]):
        self.path, self.names = path, names
        self.held: dict[Hashable, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        kept = data.rfind(b"\n") + 1
        if not _line(run).startswith(data):
            try:
                first, *others = (json.loads(line) for line in data[:kept].splitlines())
                differ = [name for name in run | first if first.get(name) != run.get(name)]
                self.held = {self.key(record): record for record in others}
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is not a file of records; name another one") from error
            if differ and not others and first.keys() == run.keys():
                kept = 0
            elif differ:
                differences = ", ".join(f"{name} {first.get(name)!r} and not {run.get(name)!r}" for name in differ)
                raise ValueError(f"{path} holds the records of another run, with {differences}; name another file")
        if kept < len(data):
            os.truncate(path, kept)
        if not kept:
            self._write(run)

    def key(self, record: dict[str, Any]) -> Hashable:
        return tuple(record[name] for name in self.names)

    def __contains__(self, record: dict[str, Any]) -> bool:
        """Whether there is a record with the same entries of `names`."""
        return self.key(record) in self.held

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record. It is in the file, whole, when this returns."""
        self._write(record)
        self.held[self.key(record)] = json.loads(json.dumps(record))

    def _write(self, values: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_line(values))
            file.flush()
            os.fsync(file.fileno())


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"
