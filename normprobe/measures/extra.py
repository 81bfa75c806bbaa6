"""The form of a measure that runs only when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.measures.loss import LossFunction
from normprobe.records import Anatomy, Measurements, Record, Skipped
from normprobe.records.extras import ExtraName

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        model: in whatever mode it is; a measure leaves it bit for bit as it was.
        inputs: on the model's device.
        anatomy: read from this model with these inputs.
        measured: what the level measured already.
        loss: `loss(output, inputs)` gives a scalar; None: see `loss.loss_of`.
        seed: of everything that is sampled.
        everywhere: as in `watch`: False where the recorded forward wrote into no parameter.
        tell: called as `tell(name of the measure, passes done, passes in all)`.
    """

    model: nn.Module
    inputs: Inputs
    anatomy: Anatomy
    measured: Measurements = field(default_factory=Measurements)
    loss: LossFunction | None = None
    seed: int = 0
    everywhere: bool = True
    tell: Progress = lambda stage, done, total: None


class Extra(ABC):
    """One measure. `name` is its field in `Measurements` as well; `records.extras.ABOUT` says what it tells."""

    name: ClassVar[ExtraName]

    @abstractmethod
    def measure(self, subject: Subject) -> tuple[Record | None, tuple[Skipped, ...]]:
        """The numbers (None where nothing could be measured), and what was not measured with the reason."""
