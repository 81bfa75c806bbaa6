"""Work that threads do side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def side_by_side(make: Callable[[_Given], _Made], given: Sequence[_Given], threads: int) -> Iterator[_Made]:
    """What `make` makes of each, in their order; no more is made ahead than the threads hold. torch has one thread
    meanwhile.

    Raises:
        Exception: what `make` raised.
    """
    if len(given) < 2 or threads < 2:
        yield from map(make, given)
        return
    ahead: deque[Future[_Made]] = deque()
    with _alone(), ThreadPoolExecutor(threads, "normprobe-draw") as pool:
        for each in given:
            ahead.append(pool.submit(make, each))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


@contextmanager
def _alone() -> Iterator[None]:
    """torch gives each thread that calls it threads of its own, which wait in a busy loop for their next work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
