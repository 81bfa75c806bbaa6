"""One forward whose outputs are held against another's, run for that alone or while it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.errors import RewriteError
from normprobe.measures.loss import told_loss
from normprobe.measures.main_output import main_output
from normprobe.records import Anatomy

_Mode = TypeVar("_Mode", bound=AbstractContextManager[Any])


@final
class Running(Generic[_Mode]):
    """A forward under way, of which copies of the outputs are kept.

    Args:
        mode: makes what the forward runs in, anew where it has to be run again.

    Attributes:
        mode: that of the last run.
        outputs: by their places; empty before it ended.
    """

    def __init__(self, mode: Callable[[], _Mode]) -> None:
        self._make = mode
        self.mode = mode()
        self.outputs: dict[str, Tensor] = {}

    def beside(self) -> _Mode:
        """The mode for one run."""
        self.mode = self._make()
        return self.mode

    def gave(self, output: Any) -> None:
        """Is told what the model returned, before it is put back as it was: an output may be one of its buffers."""
        self.outputs = {}
        for name, tensor in named_tensors(output):
            while name in self.outputs:  # such as 1 and "1" in one mapping
                name += "'"
            self.outputs[name] = tensor.detach().clone()

    def alone(self, model: nn.Module, inputs: Inputs) -> Running[_Mode]:
        """Run `model` for this; the same object."""
        with untouched(model) as keeper, torch.no_grad():
            with keeper.mode(), self.beside():
                output = invoke(model, inputs)
            self.gave(output)
        return self


@dataclass(frozen=True)
class Ran:
    """What one forward gave: its floating tensors, the one that is no loss, and its loss with the name of that."""

    outputs: list[Tensor]
    main: Tensor | None
    loss: tuple[float, str] | None

    @classmethod
    def of(cls, model: nn.Module, running: Running[Any], inputs: Inputs, anatomy: Anatomy) -> Ran:
        """What a forward of `model` on `inputs` gave; `anatomy` says which loss its outputs have.

        Raises:
            RewriteError: no floating tensor.
        """
        found = [t for t in running.outputs.values() if t.is_floating_point() and t.numel()]
        wanted = main_output(running.outputs)
        if found:
            main = next((t for t in found if t is wanted), None)
            return cls(found, main, told_loss(running.outputs, inputs, anatomy))
        raise RewriteError(
            f"nothing to prove: {type(model).__name__} returns no floating tensor",
            expected="at least one floating tensor among the outputs",
            hint="pass the part of the model that returns one, or plan without proof",
        )
