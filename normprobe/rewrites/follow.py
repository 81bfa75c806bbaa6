"""Parameters and buffers that a rewrite took out follow what is done to the model meanwhile: its dtype and device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError

_Table = MutableMapping[str, Tensor | None]
_Kept = tuple[torch.dtype, torch.device]
_Moves = dict[_Kept, set[_Kept]]


class Followed:
    """How the tensors of a model are kept, before a rewrite and, from `settle` on, after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._were = {id(held): _kept(held) for _, _, held in _tensors(model)}
        self._left: list[tuple[_Table, str, _Kept]] = []
        self._out: frozenset[_Kept] = frozenset()

    def settle(self) -> None:
        """The rewrite is done: what is no longer in the model was taken out by it."""
        self._left = [(table, name, _kept(held)) for table, name, held in _tensors(self._model)]
        inside = self.inside()
        self._out = frozenset(kept for which, kept in self._were.items() if which not in inside)
        self._were = {}

    def inside(self) -> frozenset[int]:
        """The tensors that are in the model now, by id."""
        return frozenset(id(held) for _, _, held in _tensors(self._model))

    def check(self, names: str) -> None:
        """Check that it can be told how what was taken out is to be kept now.

        Raises:
            RewriteError: it cannot.
        """
        moves = self._moves()
        for kept in self._out:
            if _goal(kept, moves) is None:
                now = sorted({f"{str(dtype)[6:]} on {device}" for dtype, device in _ways(kept, moves)})
                raise RewriteError(
                    f"cannot undo {names}: what it took out is {str(kept[0])[6:]} on {kept[1]}, the model no longer",
                    expected="one dtype and device for all that was so, and values to bring there",
                    found=f"{', '.join(now)}; nothing was changed",
                    hint="bring the model to one dtype and device first, or undo before it is moved",
                )

    def bring(self, inside: frozenset[int]) -> None:
        """Keep tensors that came back, which are not among those `inside` before, as the rest of the model is now."""
        moves = self._moves()
        for table, name, held in list(_tensors(self._model)):
            goal = None if id(held) in inside else _goal(_kept(held), moves)
            if goal is not None and goal != _kept(held):
                _bring(table, name, held, goal)

    def _moves(self) -> _Moves:
        """How tensors of the model are kept now, by how they were when the rewrite was done."""
        found: _Moves = {}
        for table, name, was in self._left:
            if (now := table.get(name)) is not None:
                found.setdefault(was, set()).add(_kept(now))
        return found


def _ways(kept: _Kept, moves: _Moves) -> set[_Kept]:
    """How tensors that were kept so are now; where there are none, all floating ones."""
    ways = moves.get(kept) or {now for found in moves.values() for now in found if now[0].is_floating_point}
    return ways if kept[0].is_floating_point else {(kept[0], device) for _, device in ways}


def _goal(kept: _Kept, moves: _Moves) -> _Kept | None:
    """How a tensor that was kept so is to be kept now; None where that is not one way, or it has no values."""
    if all(now == {was} for was, now in moves.items()):
        return kept
    ways = _ways(kept, moves)
    goal = next(iter(ways)) if len(ways) == 1 else None
    return None if goal is None or (kept[1].type == "meta") is not (goal[1].type == "meta") else goal


def _tensors(model: nn.Module) -> Iterator[tuple[_Table, str, Tensor]]:
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            yield from ((table, name, held) for name, held in table.items() if held is not None)


def _kept(tensor: Tensor) -> _Kept:
    return tensor.dtype, tensor.device


def _bring(table: _Table, name: str, held: Tensor, goal: _Kept) -> None:
    dtype, device = goal
    if not isinstance(held, nn.Parameter):
        table[name] = held.to(device=device, dtype=dtype)
        return
    held.data = held.data.to(device=device, dtype=dtype)
    if held.grad is not None:
        held.grad.data = held.grad.data.to(device=device, dtype=dtype)
