"""Recorded views run again on other tensors, so that indices can be sent through them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.anatomy.flow.ops import PIECE, base
from normprobe.capture.trace import Node, Ref


def replay(node: Node, tensor: Tensor, place: int) -> Tensor | None:
    """Run a recorded view or copy on another tensor; None where it needs more than that one tensor."""
    if node.op == PIECE:
        return tensor
    if node.function is None or sum(isinstance(a, Ref) for a in pytree.tree_leaves((node.args, node.kwargs))) != 1:
        return None
    if base(node.op) == "aten._to_copy":
        return tensor
    args, kwargs = pytree.tree_map_only(Ref, lambda _: tensor, (node.args, node.kwargs))
    function: Any = torch.ops.aten.reshape.default if base(node.op) == "aten.view" else node.function
    try:
        output = function(*args, **kwargs)
    except RuntimeError:  # a view of another dtype (complex numbers of a rotary embedding): rows cannot be told
        return None
    made = output if isinstance(output, (tuple, list)) else [output]
    return made[place] if isinstance(made[place], Tensor) else None
