"""The operation that made the first value that is not finite, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from normprobe.capture.every import watch_every
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs
from normprobe.capture.watch import Handler
from normprobe.measures.ancestry import nodes
from normprobe.measures.finite import all_finite, broken, floats
from normprobe.measures.loss import LossFunction, loss_of
from normprobe.measures.stand_ins import stand_ins
from normprobe.records import Anatomy, BrokenTensor, NonFinite, OpSite


def first_broken_operation(model: nn.Module, inputs: Inputs, path: str) -> NonFinite | None:
    """The first operation directly inside the module at `path` that gives NaN or +∞ though it is given neither.

    One more forward. A −∞ counts as a mask. None where no operation fits: a kernel that is not seen, say.

    Args:
        model: the model.
        inputs: what it is called with.
        path: of the module whose outputs are the first that are not finite.
    """
    found: list[OpSite] = []
    watch_every(model, inputs, lambda site: _Look(site, found) if site.path == path else Handler())
    return NonFinite(direction="forward", operation=found[0].op, site=found[0]) if found else None


class _Look(Handler):
    """Notes an operation that breaks sound values."""

    def __init__(self, site: OpSite, found: list[OpSite]) -> None:
        self.site, self.found, self.sound = site, found, False

    def before(self, arguments: Mapping[str, Any]) -> None:
        """An operation in place will overwrite what it was given."""
        self.sound = not self.found and not any(map(broken, floats(arguments)))

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        if self.sound and any(map(broken, floats(output))):
            self.found.append(self.site)


def first_broken_gradient(
    model: nn.Module, inputs: Inputs, anatomy: Anatomy, loss: LossFunction | None = None
) -> NonFinite | None:
    """The operation whose backward is the first to give a gradient that is not finite though it is given a finite one.

    One more forward and backward. None where the loss itself is not finite, or all gradients are.

    Args:
        model: the model.
        inputs: what it is called with.
        anatomy: tells whether the first output comes from a head.
        loss: as for `loss_of`.
    """
    sites: dict[Node, OpSite] = {}
    found: list[Node] = []
    with untouched(model), stand_ins(model) as leaves:
        watched = watch_every(model, inputs, lambda site: _Note(site, sites), grad=True)
        with torch.enable_grad():
            value, _ = loss_of(watched.output, inputs, anatomy, loss)
        if all_finite(value) is False or value.grad_fn is None:
            return None
        for node in nodes(value.grad_fn):
            _watch_node(node, found)
        torch.autograd.grad([value], list(leaves.values()), allow_unused=True)
        if not found:
            return None
        return NonFinite(direction="backward", operation=found[0].name(), site=sites.get(found[0]))


def broken_tensors(model: nn.Module) -> tuple[BrokenTensor, ...]:
    """The parameters that hold NaN or an infinity, and the buffers that hold NaN or +∞: a −∞ there is a mask.

    Under every name that leads to them; without a forward.
    """
    found, known = [], dict[int, bool]()
    for name, x in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if not x.is_floating_point() or x.is_meta:
            continue
        if id(x) not in known:
            known[id(x)] = all_finite(x) is not False
        if not known[id(x)]:
            held, buffer = x.detach().to_dense(), not isinstance(x, nn.Parameter)
            nan = int(held.isnan().sum())
            infinite = int((held.isposinf() if buffer else held.isinf()).sum())
            found += [BrokenTensor(name=name, nan=nan, infinite=infinite, count=x.numel())] if nan or infinite else []
    return tuple(found)


class _Note(Handler):
    """Notes which operation a node of autograd's graph belongs to."""

    def __init__(self, site: OpSite, sites: dict[Node, OpSite]) -> None:
        self.site, self.sites = site, sites
        self.outputs: list[Tensor] = []

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        self.outputs = floats(output)

    def settled(self) -> None:
        for tensor in self.outputs:
            if tensor.grad_fn is not None:
                self.sites.setdefault(tensor.grad_fn, self.site)
        self.outputs = []


def _watch_node(node: Node, found: list[Node]) -> RemovableHandle:
    def look(inwards: Any, outwards: Any) -> None:
        """Autograd's own words: gradients by the inputs, which it computed from those by the outputs."""
        if not found and all_finite(outwards) is not False and all_finite(inwards) is False:
            found.append(node)

    return node.register_hook(look)
