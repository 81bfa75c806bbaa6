"""Take a module out of a model, with something in its place that passes its input on."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from normprobe.errors import RewriteError
from normprobe.rewrites.base import Survey, full_name, module_at
from normprobe.rewrites.edits import bytes_in


@final
class Passed(nn.Identity):
    """The identity, which still tells dtype and device of the parameters that were here.

    State space models cast the stream to the dtype of their norm's weight before they call it. In the place of each
    parameter stands an empty buffer that `to()` moves and no state dict holds.
    """

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        for name, parameter in old.named_parameters(recurse=False):
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            self.register_buffer(name, empty, persistent=False)
        self.train(old.training)


def why_not_out(survey: Survey, path: str) -> str | None:
    """Why the module at `path` cannot be taken out; None where it can."""
    if path == ".":
        return "it is the whole model"
    spec = next((call.spec for call in survey.trace.calls if call.path == path and not call.composite), None)
    if spec is not None and len(spec.tensors()) != 1:
        return "it is given more than one tensor, a gate perhaps, and does more than to norm"
    return None


def goes(model: nn.Module, path: str) -> tuple[tuple[str, ...], int]:
    """Full names of the parameters that go with the module at `path`, and the memory that undo holds once it is out."""
    module = module_at(model, path)
    names = tuple(full_name(path, name) for name, _ in module.named_parameters(remove_duplicate=False))
    return names, bytes_in(module)


def take_out(model: nn.Module, path: str) -> nn.Module:
    """Put `Passed` where the module at `path` is, and give that module.

    Raises:
        RewriteError: there is no module.
    """
    parent, _, own = path.rpartition(".")
    holder = module_at(model, parent or ".")
    old = holder._modules.get(own)
    if old is None:
        raise RewriteError(f"{path} cannot be taken out", expected="a module as planned", found="none")
    holder._modules[own] = Passed(old)
    return old
