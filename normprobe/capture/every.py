"""One forward in which every operation is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.watch import ALL, Frame, Handler, Watched, Watcher
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.capture.writes import Keeper
from normprobe.records import OpSite

Make = Callable[[OpSite], Handler]


def watch_every(model: nn.Module, inputs: Inputs, make: Make, *, grad: bool = False) -> Watched:
    """As `watch`, with one handler for every operation that runs, made when it first does.

    Args:
        model: any module.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        make: gives the handler of a site.
        grad: whether autograd records the forward.
    """
    with untouched(model) as keeper, torch.set_grad_enabled(grad):
        watcher = _Everything(make, keeper)
        with wrapped_forwards(model, watcher.around), watcher.modes(ALL):
            output = invoke(model, inputs)
        watcher.settle()
    return Watched(output, (), watcher.failed)


class _Everything(Watcher):
    def __init__(self, make: Make, keeper: Keeper) -> None:
        super().__init__({}, keeper, True)
        self.handlers = _Made(make)
        self.plans = _Plans()  # type: ignore[assignment]
        self.frame = self.root = Frame(self.plans.get((".", 0), {}))


class _Made(dict[OpSite, Handler]):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, site: OpSite) -> Handler:
        handler = self[site] = self.make(site)
        return handler


class _Plans:
    """Watches every run of every module."""

    def get(self, run: tuple[str, int], default: Any = None) -> Any:
        return _Plan(*run)


@dataclass(frozen=True)
class _Plan:
    """Watches every operation of one run of a module."""

    path: str
    execution: int

    def get(self, op: str, default: Any = None) -> Any:
        return _Ordinals(self.path, self.execution, op)


@dataclass(frozen=True)
class _Ordinals:
    """Watches every call of one operation."""

    path: str
    execution: int
    op: str

    def get(self, ordinal: int, default: Any = None) -> OpSite:
        return OpSite(path=self.path, op=self.op, ordinal=ordinal, execution=self.execution)
