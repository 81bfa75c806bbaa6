"""The header of a safetensors file: which tensors it holds, and where.

A file is eight bytes with the length of the header, the header as JSON, and the values one after the other (safetensors
README, section Format).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normprobe.errors import CheckpointError

LIMIT = 100_000_000  # bytes of a header that the format allows
_LENGTH = struct.Struct("<Q")
ALIGNED = 64  # bytes: memory of torch begins at such multiples, and kernels may sum in another order elsewhere


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: as the format names it, such as BF16.
        shape: its extents.
        start, end: its bytes, counted from the first value of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What one file holds.

    Attributes:
        entries: the tensors by name, in the order of their values.
        metadata: texts that come with the file.
        size: bytes before the first value.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] = field(default_factory=dict)
    size: int = 0

    @property
    def values(self) -> int:
        """Bytes of all values."""
        return max((entry.end for entry in self.entries.values()), default=0)

    def range_of(self, entry: Entry) -> tuple[int, int]:
        """Where the bytes of a tensor begin and end in the file."""
        return self.size + entry.start, self.size + entry.end


def read_header(path: Path) -> Header:
    """The header of the safetensors file `path`, which has been found whole before.

    Raises:
        CheckpointError: the header is longer than the format allows or than the file, is no JSON object, or names a
            tensor twice.
    """
    total = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if not 2 <= length <= min(LIMIT, total - _LENGTH.size):
            raise _broken(path, f"a header of 2 to {min(LIMIT, total):,} bytes", f"{length:,} bytes said")
        text = stream.read(length)
    try:
        rows = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
        metadata = rows.pop("__metadata__", {})
        entries = {name: _entry(row) for name, row in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken(path, "a JSON object of tensors", f"{type(error).__name__}: {error}") from error
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    return Header(ordered, metadata, _LENGTH.size + length)


def laid_out(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> Header:
    """A header for new values of these (dtype, shape, bytes), one behind the other in the order given."""
    entries, place = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = Entry(dtype, shape, place, place + size)
        place += size
    return Header(entries, metadata, len(encoded(entries, metadata)))


def encoded(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first value; spaces at the end let the values begin at a multiple of `ALIGNED`."""
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        rows[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.end]}
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNED)
    return _LENGTH.pack(len(text)) + text


def _entry(row: Mapping[str, Any]) -> Entry:
    start, end = row["data_offsets"]
    return Entry(str(row["dtype"]), tuple(int(extent) for extent in row["shape"]), int(start), int(end))


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def _broken(path: Path, expected: str, found: str) -> CheckpointError:
    hint = "download or save the file again"
    return CheckpointError(f"{path}: cannot be read as safetensors", expected=expected, found=found, hint=hint)
