"""Parts of parameters and buffers that a forward selects: one parameter may hold the gains of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from normprobe.capture.trace import Ref, Trace
from normprobe.records.parts import Cut, cuts_of, part_name

_SELECTIONS = frozenset({"select", "slice", "unbind", "split", "split_with_sizes", "detach", "alias"})
_HELD = frozenset({"parameter", "buffer"})


class Parts(Mapping[str, Tensor]):
    """Tensors by name, and by the names of parts of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name]
        held, cuts = cuts_of(name, self._tensors)
        return self._tensors[held].detach()[cuts]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def held_part(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a model by its name, or that part of one; script modules hold theirs without
    `get_parameter`."""
    try:
        tensor: Tensor = attrgetter(name)(model)
        return tensor
    except AttributeError:
        held, cuts = cuts_of(name, ())
        if not cuts:
            raise
        part: Tensor = attrgetter(held)(model)[cuts]
        return part


def selected(trace: Trace, value: int) -> str | None:
    """The name of the parameter or buffer that a value is, or of the part of one that it is by selections alone; None
    where something else is done to it, or the part is no run of each axis."""
    nodes, at = [], value
    while (node := trace.producer(at)).op not in _HELD:
        if node.op.split(".")[:1] != ["aten"] or node.op.split(".")[1] not in _SELECTIONS:
            return None
        if not node.args or not isinstance(node.args[0], Ref):
            return None
        nodes.append((node, at))
        at = node.args[0].value
    shown = torch.empty(trace.values[at].shape, device="meta")
    for step, result in reversed(nodes):
        made = step.function(shown, *step.args[1:], **step.kwargs)
        shown = made if isinstance(made, Tensor) else made[step.outputs.index(result)]
    cuts = _cuts(trace.values[at].shape, shown)
    return None if cuts is None else part_name(node.name, cuts)


def _cuts(shape: tuple[int, ...], part: Tensor) -> list[Cut] | None:
    """How a contiguous tensor of this shape is cut to give a view of it; None where that takes more than one run of
    each axis."""
    cuts: list[Cut] = []
    kept, offset = list(zip(part.shape, part.stride(), strict=True)), int(part.storage_offset())
    steps = torch.empty(shape, device="meta").stride()
    for size, step in zip(shape, steps, strict=True):
        start, offset = divmod(offset, step) if step else (0, offset)
        if kept and kept[0][1] == step and start + kept[0][0] <= size:
            length = kept.pop(0)[0]
            cuts.append(slice(None) if length == size else slice(start, start + length))
        else:
            cuts.append(start)
    return None if kept else cuts
