"""Try other values of parameters without writing to these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def on_copies(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """While open every module that holds one of these parameters holds a copy of it, one for all, that may be written.

    A write, also one that is taken back, would raise the version of a parameter, and a graph of autograd that was built
    before could no longer go backward.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    copies = {id(named[n]): nn.Parameter(named[n].detach().clone(), named[n].requires_grad) for n in set(names)}
    tables = [module._parameters for module in model.modules()]
    held = [(table, own, p) for table in tables for own, p in table.items() if p is not None and id(p) in copies]
    try:
        for table, own, parameter in held:
            table[own] = copies[id(parameter)]
        yield
    finally:
        for table, own, parameter in held:
            table[own] = parameter
