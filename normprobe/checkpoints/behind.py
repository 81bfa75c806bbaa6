"""Work that is done behind the caller's back, one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar, final

_Made = TypeVar("_Made")


@final
class Behind(Generic[_Made]):
    """A thread that takes one piece of work while the caller goes on; the next one waits for it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "normprobe-write")
        self._last: tuple[Future[_Made], Callable[[_Made], object]] | None = None

    def do(self, work: Callable[[], _Made], then: Callable[[_Made], object]) -> None:
        """Begin with `work`; what it gives goes to `then`, in the caller's thread, once the caller is here again.

        Raises:
            Exception: what the piece before raised.
        """
        self.settle()
        self._last = self._pool.submit(work), then

    def settle(self) -> None:
        """Wait for what was begun.

        Raises:
            Exception: what it raised.
        """
        if self._last is not None:
            (made, then), self._last = self._last, None
            then(made.result())

    def close(self) -> None:
        """Wait until nothing is done any more; what it was stays untold."""
        self._last = None
        self._pool.shutdown()
