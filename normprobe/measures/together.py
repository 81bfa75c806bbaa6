"""Small tensors that many handlers leave, told together: between the large operations of a forward every small one
finds the caches cold, and one operation on sixteen rows costs hardly more than on one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Told = TypeVar("Told")

_MOST = 16  # items that wait


class Together(Generic[Item, Told]):
    """Collects items and tells those that are alike in one go.

    Args:
        tell: what each of some items that are alike says.
        alike: items with equal keys can be told in one go.
    """

    def __init__(self, tell: Callable[[Sequence[Item]], Sequence[Told]], alike: Callable[[Item], Hashable]) -> None:
        self._tell, self._alike = tell, alike
        self._waiting: list[tuple[Item, Callable[[Told], None]]] = []

    def add(self, item: Item, give: Callable[[Told], None]) -> None:
        """Take an item; what it says is given at the latest at the next `finish`."""
        self._waiting.append((item, give))
        if len(self._waiting) >= _MOST:
            self.finish()

    def finish(self) -> None:
        """Tell what waits."""
        waiting, self._waiting = self._waiting, []
        groups: dict[Hashable, list[tuple[Item, Callable[[Told], None]]]] = {}
        for item, give in waiting:
            groups.setdefault(self._alike(item), []).append((item, give))
        for group in groups.values():
            for (_, give), told in zip(group, self._tell([item for item, _ in group]), strict=True):
                give(told)
