"""Records of a run, one a line, that are only ever added to: a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any


class Records:
    """A file whose first line says what run it is of, and every other one what was measured.

    A line that was being written when the run was interrupted is cut off.

    Args:
        path: The file; its folder is made.
        run: What all its records have in common, as plain values.
        names: The entries of a record that tell it from every other one.

    Raises:
        ValueError: If the file is of another run; the message says what differs.
    """

    def __init__(self, path: Path, run: dict[str, Any], names: tuple[str, ...]):
        self.path, self.names = path, names
        self.held: dict[Hashable, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = b""
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        if not whole:
            self._write(run)
            return
        try:
            first, *others = (json.loads(line) for line in whole.splitlines())
            differ = [name for name in run | first if first.get(name) != run.get(name)]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a file of records; name another one") from error
        if differ:
            differences = ", ".join(f"{name} {first.get(name)!r} and not {run.get(name)!r}" for name in differ)
            raise ValueError(f"{path} holds the records of another run, with {differences}; name another file")
        for record in others:
            self.held[self.key(record)] = record

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
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
