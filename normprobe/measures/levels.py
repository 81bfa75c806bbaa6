"""All that a level measures, and the further measures that were asked for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.capture.invoke import Inputs
from normprobe.measures.batchnorm import Kept
from normprobe.measures.bounded import Bounded
from normprobe.measures.extra import Subject
from normprobe.measures.extras import measure_extras
from normprobe.measures.forward import measure_forward
from normprobe.measures.gradients import measure_gradients
from normprobe.measures.optimizer import measure_optimizer, trained
from normprobe.measures.repeats import Repeats
from normprobe.measures.settings import Wanted
from normprobe.measures.twins import Twins
from normprobe.records import Anatomy, Measurements, Skipped


def measure_level(
    model: nn.Module, inputs: Inputs, anatomy: Anatomy, wanted: Wanted, everywhere: bool
) -> tuple[Measurements, tuple[Skipped, ...]]:
    """One measured pass, which looks into modules without a watched operation too if `everywhere`; at level "backward"
    one more with gradients; then the further measures."""
    wanted.tell("measure", 0, 0)
    kept, repeats = Kept(model, inputs, anatomy), Repeats(model, anatomy)
    bounded = Bounded(model, inputs, anatomy, wanted.seed)
    with kept.looking(), repeats.looking(), bounded.looking():
        measured, skipped = measure_forward(
            model, inputs, anatomy, wanted.seed, exact=wanted.exact, everywhere=everywhere
        )
    stand_ins, unseen = bounded.record()
    also = {"repeated_norms": repeats.record(), "bounded_norms": (*stand_ins, *measured.bounded_norms)}
    measured, skipped = measured.model_copy(update=also), (*skipped, *unseen)
    if kept.norms and "batchnorm" not in wanted.measures and "all" not in wanted.measures:
        batchnorm, more = kept.record(kept.running())
        measured, skipped = measured.model_copy(update={"batchnorm": batchnorm}), (*skipped, *more)
    if wanted.level == "backward":
        wanted.tell("gradients", 0, 0)
        measured, more = _backward(model, inputs, anatomy, wanted, measured)
        skipped = (*skipped, *more)
    subject = Subject(model, inputs, anatomy, measured, wanted.loss, wanted.seed, everywhere, wanted.tell)
    measured, more = measure_extras(wanted.measures, subject)
    return measured, (*skipped, *more)


def _backward(
    model: nn.Module, inputs: Inputs, anatomy: Anatomy, wanted: Wanted, measured: Measurements
) -> tuple[Measurements, tuple[Skipped, ...]]:
    """With gradients, what the optimiser makes of those of gains and offsets, and whether outputs that are the same get
    the same ones."""
    optimizer = wanted.optimizer if isinstance(wanted.optimizer, Optimizer) else None
    gains = frozenset[str]() if optimizer is None else trained(model, anatomy)
    held: dict[str, Tensor] = {}
    twins = Twins(model, anatomy, measured.init)

    def seen(name: str, gradient: Tensor) -> None:
        twins.seen(name, gradient)
        held.update({name: gradient} if name in gains else {})

    gradients, skipped = measure_gradients(
        model,
        inputs,
        anatomy,
        wanted.loss,
        wanted.lr,
        measured.residual,
        untrained=measured.init is not None and measured.init.trained is False,
        seen=seen,
    )
    known = None if optimizer is None else measure_optimizer(model, anatomy, optimizer, held)
    return measured.model_copy(update={"gradients": gradients, "optimizer": known, "init": twins.record()}), skipped
