"""Small tensors that many handlers leave, told together: between the large operations of a forward every small one
finds the caches cold, and one operation on sixteen rows costs hardly more than on one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from normprobe.capture.watch import reason
from normprobe.measures.scratch import Scratch

Item = TypeVar("Item")
Told = TypeVar("Told")

_MOST = 16  # items that wait
_SMALL = 2**18  # bytes; larger tensors are none that lie between others


@dataclass(frozen=True)
class _Waiting(Generic[Item, Told]):
    item: Item
    give: Callable[[Told], None]
    refuse: Callable[[str], None]


class Together(Generic[Item, Told]):
    """Collects items and tells those that are alike in one go. It does not raise: an error is the reason of every item
    that it keeps from being told.

    Args:
        tell: what each of some items that are alike says.
        alike: items with equal keys can be told in one go.
    """

    def __init__(self, tell: Callable[[Sequence[Item]], Sequence[Told]], alike: Callable[[Item], Hashable]) -> None:
        self._tell, self._alike = tell, alike
        self._waiting: list[_Waiting[Item, Told]] = []
        self._scratch = Scratch()

    def keep(self, name: str, small: Tensor) -> Tensor:
        """A copy of a small tensor of the next item, good until the item is told.

        It lies in one piece of memory for all that wait: small pieces that stay among the large tensors of a forward
        keep the memory between them from being used again.
        """
        if small.numel() * small.element_size() > _SMALL:
            return small.clone()
        held: Tensor = self._scratch.take(f"{name} {tuple(small.shape)}", (_MOST, *small.shape), small)
        return held[len(self._waiting)].copy_(small)

    def add(self, item: Item, give: Callable[[Told], None], refuse: Callable[[str], None]) -> None:
        """Take an item.

        Args:
            item: what is to be told.
            give: called with what it says, at the latest at the next `finish`.
            refuse: called with the reason where that cannot be told.
        """
        self._waiting.append(_Waiting(item, give, refuse))
        if len(self._waiting) >= _MOST:
            self.finish()

    def finish(self) -> None:
        """Tell what waits."""
        waiting, self._waiting = self._waiting, []
        groups: dict[Hashable, list[_Waiting[Item, Told]]] = {}
        for each in waiting:
            groups.setdefault(self._alike(each.item), []).append(each)
        for group in groups.values():
            self._give(group)

    def _give(self, group: Sequence[_Waiting[Item, Told]]) -> None:
        try:
            told = self._tell([each.item for each in group])
        except Exception as error:  # anything: the group has no numbers, the others have theirs
            for each in group:
                each.refuse(reason(error))
            return
        for each, said in zip(group, told, strict=True):
            try:
                each.give(said)
            except Exception as error:  # of this item alone
                each.refuse(reason(error))
