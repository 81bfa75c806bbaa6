"""Sums that tell whether bytes are still what they were.

XXH3 with 128 bits finds damage, as fast as memory is read. It is no signature: whoever can change a file can change the
sum that lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128

PART = 1 << 20  # bytes that are read at a time: few enough that they are still in the cache when they are summed

digest = xxh3_128


def parts_in(stream: BinaryIO, start: int, end: int) -> Iterator[memoryview]:
    """The bytes of an open file from `start` to `end`, part by part; each lies where the one before lay."""
    room = memoryview(bytearray(min(PART, end - start)))
    stream.seek(start)
    while start < end and (size := stream.readinto(room[: end - start])):  # type: ignore[attr-defined]
        yield room[:size]
        start += size


def digest_of(path: Path) -> str:
    """The sum over a whole file."""
    found = digest()
    with path.open("rb", buffering=0) as stream:
        for part in parts_in(stream, 0, path.stat().st_size):
            found.update(part)
    return found.hexdigest()
