"""What a model is made of besides values: classes, attributes and tables of its modules; what changed, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_TABLES = tuple(name for name, held in nn.Module().__dict__.items() if isinstance(held, (dict, set)))
_CLASS = ("", "__class__")
_ABSENT = object()
Key = tuple[str, Any]  # a table and the name there; no table for the module's own attributes and its class


def _entries(module: nn.Module) -> dict[Key, Any]:
    own = module.__dict__
    found: dict[Key, Any] = {("", name): held for name, held in own.items() if name not in _TABLES}
    found[_CLASS] = type(module)
    for table in _TABLES:
        held = own.get(table, ())
        found |= {(table, name): held[name] if isinstance(held, dict) else True for name in held}
    return found


@dataclass(frozen=True)
class Change:
    """What is another thing in one module than it was; what was or is not there is `_ABSENT`.

    Attributes:
        order: the names in each table that changed, as they stood before.
    """

    path: str
    module: nn.Module
    before: dict[Key, Any]
    left: dict[Key, Any]
    order: dict[str, tuple[Any, ...]]

    def moved(self) -> str | None:
        """What has changed since in what this changed; None for nothing.

        Buffers are told by their presence: a cast makes new ones.
        """
        now = _entries(self.module)
        for key, left in self.left.items():
            is_now = now.get(key, _ABSENT)
            as_buffer = key[0] == "_buffers" and isinstance(left, Tensor) and isinstance(is_now, Tensor)
            if is_now is not left and not as_buffer:
                return _told(key, left, is_now)
        return None

    def take_back(self) -> None:
        """Class, attributes and tables as they were; entries that were not changed stay as they are now."""
        own = self.module.__dict__
        for (table, name), before in self.before.items():
            if (table, name) == _CLASS:
                self.module.__class__ = before
            elif not table and before is _ABSENT:
                own.pop(name, None)
            elif not table:
                own[name] = before
        for table, order in self.order.items():
            held = own[table]
            now = dict(held) if isinstance(held, dict) else dict.fromkeys(held, True)
            back = {name: self.before.get((table, name), now.get(name, _ABSENT)) for name in (*order, *now)}
            held.clear()
            held.update({name: value for name, value in back.items() if value is not _ABSENT})


def _told(key: Key, left: Any, now: Any) -> str:
    if key == _CLASS:
        return f"its class is {now.__name__} of {now.__module__}, no longer the one that the rewrite made"
    what = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "child"}.get(key[0], "attribute")
    state = "is gone" if now is _ABSENT else "is there again" if left is _ABSENT else "is another one"
    return f"its {what} {key[1]} {state}"


class Structure:
    """A model's modules as they are now, to put them back; `settle` keeps of them what has changed until then.

    Values of tensors, and what is reached through an attribute, are not held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._were = [(path or ".", module, _entries(module)) for path, module in model.named_modules()]
        self._changes: tuple[Change, ...] | None = None

    def settle(self) -> tuple[tuple[Change, ...], tuple[nn.Module, ...]]:
        """The changes until now, and the modules that are in the model only before or only after them."""
        changes = tuple(self._changed())
        were = {module: None for _, module, _ in self._were}
        are = {module: None for module in self._model.modules()}
        self._changes, self._were = changes, []
        return changes, tuple(m for m in (*were, *are) if (m in were) is not (m in are))

    def put_back(self) -> None:
        """Take the changes back, those until `settle`, or all until now."""
        for change in tuple(self._changed()) if self._changes is None else self._changes:
            change.take_back()

    def _changed(self) -> Iterator[Change]:
        for path, module, before in self._were:
            now = _entries(module)
            keys = [key for key in {**before, **now} if before.get(key, _ABSENT) is not now.get(key, _ABSENT)]
            if keys:
                tables = dict.fromkeys(table for table, _ in keys if table)
                yield Change(
                    path,
                    module,
                    {key: before.get(key, _ABSENT) for key in keys},
                    {key: now.get(key, _ABSENT) for key in keys},
                    {table: tuple(name for where, name in before if where == table) for table in tables},
                )
