"""Python's collector of reference cycles runs less often while a graph of many small objects grows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 100_000  # new objects before the youngest are looked through; Python's own default is 700 to 2000


@contextmanager
def fewer_collections() -> Iterator[None]:
    """While open, cycles are looked for once in 100,000 new objects; the thresholds are put back afterwards.

    A graph holds no cycles, but every new object brings a full collection nearer, which goes through all objects of
    the process (a million once torch and transformers are loaded). A collector that is switched off stays so.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _OBJECTS:
        gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
