"""All that a level measures, and the further measures that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.measures.extra import Progress, Subject
from normprobe.measures.extras import measure_extras
from normprobe.measures.forward import measure_forward
from normprobe.measures.gradients import measure_gradients
from normprobe.measures.loss import LossFunction
from normprobe.records import Anatomy, Level, Measurements, Skipped


def measure_level(
    model: nn.Module,
    inputs: Inputs,
    anatomy: Anatomy,
    level: Level,
    measures: Sequence[str],
    loss: LossFunction | None,
    lr: float | None,
    seed: int,
    tell: Progress,
    everywhere: bool,
) -> tuple[Measurements, tuple[Skipped, ...]]:
    """One measured pass, which looks into modules without a watched operation too if `everywhere`; at level "backward"
    one more with gradients; then the measures of these names."""
    tell("measure", 0, 0)
    measured, skipped = measure_forward(model, inputs, anatomy, seed=seed, everywhere=everywhere)
    if level == "backward":
        tell("gradients", 0, 0)
        gradients, more = measure_gradients(model, inputs, anatomy, loss, lr, measured.residual)
        measured, skipped = measured.model_copy(update={"gradients": gradients}), (*skipped, *more)
    measured, more = measure_extras(measures, Subject(model, inputs, anatomy, measured, loss, seed, tell))
    return measured, (*skipped, *more)
