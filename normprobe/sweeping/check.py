"""`coordinate_check`: what a few optimiser steps do to every module's output, at several widths or depths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe import checks
from normprobe.anatomy.build import read
from normprobe.capture.experts import valueless_experts
from normprobe.capture.invoke import Inputs
from normprobe.capture.recorder import record
from normprobe.errors import NormprobeError, SettingError
from normprobe.inputs import inputs_from_config
from normprobe.measures.loss import LossFunction, training_loss_of
from normprobe.optimising.mup import carried_places, groups, named_optimizer
from normprobe.records import Anatomy, Settings
from normprobe.records.sweep import (
    SLOPE_LIMIT,
    Axis,
    LearningRates,
    ModuleScale,
    Optimizer,
    Parametrisation,
    ScaleVerdict,
    Sweep,
    SweepReport,
)
from normprobe.rewrites.mup import Place, carried
from normprobe.sweeping.mup import initial_factors, rescale
from normprobe.sweeping.roles import places
from normprobe.sweeping.steps import Scale, scales, slope, train

Progress = Callable[[str, int, int], None]
Factory = Callable[[int], "nn.Module | tuple[nn.Module, Inputs]"]


def coordinate_check(
    factory: Factory,
    widths: Sequence[int],
    *,
    axis: Axis = "width",
    steps: int = 4,
    optimizer: Optimizer | Literal["adamw"] = "adam",
    lr: float = 1e-3,
    lrs: Sequence[float] = (),
    loss: LossFunction | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> SweepReport:
    """Train the same model at several widths for a few steps, and say which outputs grow or vanish with the width.

    Under standard parametrisation, and for widths under normprobe's muP parameter groups with the initial scales that
    muP asks for, the smallest width being the base, where both are the same. Models that `MuP` rewrote are trained
    under muP alone, with the groups of the base that they carry. Every run builds its model anew under the seed and
    trains it on one batch.

    Args:
        factory: `factory(width)` gives a module, or (module, inputs); without inputs its configuration must say what
            it takes. Not cached: what it returns is trained.
        widths: at least two, or depths with `axis="depth"`.
        axis: what the number is; for depths there is no muP.
        steps: optimiser steps.
        optimizer: adam (adamw is the same here: nothing decays), or sgd without momentum.
        lr: learning rate at the smallest width.
        lrs: learning rates whose loss after the steps is compared at every width (μTransfer, Yang et al. 2022).
        loss: `loss(output, inputs)`; else that of `probe`, but where it takes the mean square of the first output the
            mean squared distance from unit normal noise (`training_loss_of`). The report names it.
        seed: of initialisation and made inputs.
        settings: as in `probe`; NP607 is the check that judges sweeps.
        progress: called as `progress(stage, done, total)`.

    Raises:
        SettingError: fewer than two sizes, numbers that make no sense, an unknown optimiser, check or limit; models
            that `MuP` rewrote beside others.
    """
    sizes = tuple(sorted(set(widths)))
    settings = settings or Settings()
    _check(sizes, steps, (lr, *lrs))
    named = named_optimizer(optimizer)
    checks.chosen_checks(settings)
    runs = _Runs(factory, sizes, steps, named, loss, seed, progress or (lambda stage, done, total: None))
    with torch.random.fork_rng(devices=()):
        sweeps = tuple(
            Sweep(parametrisation=kind, modules=runs.modules(kind, lr), rates=runs.rates(kind, lrs))
            for kind in runs.kinds(axis)
        )
    told = {"steps": steps, "optimizer": named, "lr": lr, "loss": runs.named, "seed": seed}
    notes = tuple(dict.fromkeys(runs.notes))
    found = SweepReport(axis=axis, sizes=sizes, sweeps=sweeps, notes=notes, **told)
    return checks.judged_sweep(found, settings)


def _check(sizes: Sequence[int], steps: int, lrs: Sequence[float]) -> None:
    if len(sizes) < 2 or sizes[0] < 1:
        raise SettingError(
            "a sweep needs sizes", expected="two or more different ones, each at least 1", found=f"{sizes}"
        )
    if steps < 1:
        raise SettingError("a sweep needs steps", expected="at least 1", found=str(steps))
    odd = [lr for lr in lrs if not (lr > 0 and math.isfinite(lr))]
    if odd:
        raise SettingError("a learning rate makes no sense", expected="a number above 0", found=repr(odd[0]))


@dataclass
class _Runs:
    """Builds and trains the models of one sweep."""

    factory: Factory
    sizes: tuple[int, ...]
    steps: int
    optimizer: Optimizer
    loss: LossFunction | None
    seed: int
    tell: Progress

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.named = ""
        self.anatomy: Anatomy | None = None
        self.carried = False

    def _value(self, output: Any, inputs: Inputs) -> Tensor:
        """The loss of one step; every model of the sweep has the same, which the Anatomy of the first one decides."""
        value, self.named = training_loss_of(output, inputs, self.anatomy or Anatomy(), self.loss)
        return value

    def kinds(self, axis: Axis) -> tuple[Parametrisation, ...]:
        """The parametrisations that are compared; of models that are in muP already that one."""
        model, _ = self._built(self.sizes[0])
        self.carried = carried(model) is not None
        if self.carried and axis == "width":
            return ("mup",)
        return ("standard", "mup") if axis == "width" else ("standard",)

    def modules(self, kind: Parametrisation, lr: float) -> tuple[ModuleScale, ...]:
        """One row for every module that all sizes have."""
        found: dict[int, Mapping[str, Scale]] = {}
        for done, size in enumerate(self.sizes):
            self.tell(f"coordinates, {kind}", done, len(self.sizes))
            with self._told(size):
                model, inputs, rates = self._prepared(kind, size, lr)
                found[size] = scales(model, inputs, rates, self.steps, self._value, self.optimizer)
        common = [path for path in found[self.sizes[0]] if all(path in one for one in found.values())]
        return tuple(_row(path, {size: one[path] for size, one in found.items()}) for path in common)

    def rates(self, kind: Parametrisation, lrs: Sequence[float]) -> LearningRates | None:
        """The loss after the steps at every size and learning rate."""
        if not lrs:
            return None
        losses = []
        for done, size in enumerate(self.sizes):
            self.tell(f"learning rates, {kind}", done, len(self.sizes))
            with self._told(size):
                row = [self._trained(*self._prepared(kind, size, lr)) for lr in lrs]
            losses.append(tuple(row))
        best = tuple(lrs[row.index(min(row))] if math.isfinite(min(row)) else math.nan for row in losses)
        return LearningRates(rates=tuple(lrs), losses=tuple(losses), best=best)

    def _trained(self, model: nn.Module, inputs: Inputs, rates: list[dict[str, object]]) -> float:
        return train(model, inputs, rates, self.steps, self._value, self.optimizer)

    def _prepared(
        self, kind: Parametrisation, size: int, lr: float
    ) -> tuple[nn.Module, Inputs, list[dict[str, object]]]:
        """A fresh model with its inputs and the parameter groups of the parametrisation."""
        model, inputs = self._built(size)
        if self.carried:
            found = carried_places(model, inputs)
            self._note(found)
            return model, inputs, groups(model, found, lr, self.optimizer)
        if kind == "standard" or size == self.sizes[0]:
            return model, inputs, [{"params": list(model.parameters()), "lr": lr}]
        base, base_inputs = self._built(self.sizes[0])
        found = places(model, base, inputs, base_inputs)
        self._note(found)
        rescale(model, initial_factors(model, base, found))
        _multiply(model, found)
        return model, inputs, groups(model, found, lr, self.optimizer)

    def _built(self, size: int) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(self.seed)
        with self._told(size):
            made = self.factory(size)
        model, inputs = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise SettingError(
                "the factory returned no model", expected="a module, or (module, inputs)", found=type(model).__name__
            )
        if inputs is None:
            inputs, _ = inputs_from_config(model, batch=4, seed=self.seed, tokens=32)
        model.eval()
        with self._told(size):
            if self.anatomy is None:
                self.anatomy = _read(model, inputs)
        return model, inputs

    @contextmanager
    def _told(self, size: int) -> Iterator[None]:
        """What the user's own code raises, with the size at which it did."""
        try:
            yield
        except NormprobeError:
            raise
        except Exception as error:
            raise SettingError(
                f"the model of size {size} does not run",
                expected="a factory whose model and inputs fit each other at every size",
                found=f"{type(error).__name__}: {error}",
            ) from error

    def _note(self, found: Mapping[str, Place]) -> None:
        for name, place in found.items():
            if place.role == "shared" and not place.multiplied:
                self.notes.append(f"{name}: {place.why}; as muP asks, its logits were multiplied by base/width here")
            elif place.role == "unknown":
                self.notes.append(f"{name}: role unknown ({place.why}); its learning rate is left as it is")


def _read(model: nn.Module, inputs: Inputs) -> Anatomy:
    with valueless_experts(model):
        return read(model, record(model, inputs)).anatomy


def _multiply(model: nn.Module, found: Mapping[str, Place]) -> None:
    """Divide what shared parameters read out by the growth of their fan-in, which their values cannot carry."""
    for place in found.values():
        if place.role == "shared":
            model.get_submodule(place.readout).register_forward_hook(partial(_divided, place.ratio))


def _divided(ratio: float, module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor / ratio, output)


def _row(path: str, found: Mapping[int, Scale]) -> ModuleScale:
    activation = {size: one.activation for size, one in found.items()}
    update = {size: one.update for size, one in found.items()}
    slopes = slope(activation), slope(update)
    return ModuleScale(
        path=path,
        activation=tuple(activation.values()),
        update=tuple(update.values()),
        activation_slope=slopes[0],
        update_slope=slopes[1],
        verdict=_verdict(*slopes),
    )


def _verdict(activation: float, update: float) -> ScaleVerdict:
    if math.isnan(update):
        return "unknown"
    if max(activation, update) > SLOPE_LIMIT:
        return "growing"
    if update < -SLOPE_LIMIT:
        return "vanishing"
    return "shrinking" if activation < -SLOPE_LIMIT else "constant"
