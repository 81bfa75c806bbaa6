"""Work that threads do side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def side_by_side(make: Callable[[_Given], _Made], given: Sequence[_Given], threads: int) -> Iterator[_Made]:
    """What `make` makes of each, in their order; no more is made ahead than the threads hold.

    Raises:
        Exception: what `make` raised.
    """
    if len(given) < 2 or threads < 2:
        yield from map(make, given)
        return
    ahead: deque[Future[_Made]] = deque()
    with ThreadPoolExecutor(threads, "normprobe-draw") as pool:
        for each in given:
            ahead.append(pool.submit(make, each))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
