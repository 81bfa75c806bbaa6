"""`probe(model)`: record one forward, read the Anatomy, measure, judge. The one orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe import checks
from normprobe.anatomy.build import Reading, read
from normprobe.capture.collector import fewer_collections
from normprobe.capture.experts import valueless_experts
from normprobe.capture.invoke import Inputs
from normprobe.capture.recorder import record
from normprobe.capture.rejections import rejections
from normprobe.capture.subject import check_model
from normprobe.capture.unwrap import unwrapped, wrappers_aside
from normprobe.errors import InputError, SettingError
from normprobe.inputs.declared import declared_by
from normprobe.inputs.given import given_inputs, on_device
from normprobe.measures.computed_weights import measure_computed_weights
from normprobe.measures.extra import Progress
from normprobe.measures.gains import measure_gains
from normprobe.measures.optimizer import measure_optimizer
from normprobe.measures.own_settings import with_own
from normprobe.measures.settings import Wanted, check_wanted
from normprobe.records import Anatomy, Level, Measurements, ReportData, Settings, Skipped, Target
from normprobe.report.report import Report
from normprobe.rewrites.base import Survey
from normprobe.rewrites.mup import declared_by_mup
from normprobe.rewrites.norms.fold import foldable
from normprobe.version import versions

Loss = Callable[[Any, Any], Tensor]


def probe(
    model: nn.Module,
    inputs: Inputs | str | None = None,
    *,
    level: Level = "forward",
    measures: Sequence[str] = (),
    tokenizer: Any = None,
    loss: Loss | None = None,
    lr: float | None = None,
    optimizer: Optimizer | None = None,
    autocast: str | torch.dtype | None = None,
    exact: bool = False,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Find the norms of a model, read its residual streams and attention, measure what its signal does, and judge.

    The model is left bit for bit as it was: parameters, buffers, gradients, train flags, hooks, random states.

    Args:
        model: any module; run in eval mode on its own device. Wrappers that only run another module (DataParallel,
            DDP, `torch.compile`, PEFT) are looked behind, so that paths are those of the module inside.
        inputs: a tensor, a tuple (positional), a mapping (by keyword), a text (with `tokenizer`), or None where the
            model's config says enough (the report then says what was taken).
        level: "structure" for the Anatomy alone; "forward" for one measured pass too; "backward" for one more pass
            with gradients.
        measures: further measures by name (`normprobe explain measures` lists them with the passes that each takes), or
            "all"; they need level "forward" or "backward".
        tokenizer: called as `tokenizer(text, return_tensors="pt")` for inputs given as a text.
        loss: `loss(output, inputs)` gives the scalar whose gradients are taken at level "backward".
        lr: learning rate; level "backward" then says how large a step is beside the weights of every branch.
        optimizer: made for the parameters of `model`; what it does to the gains of norms is then judged, by copies of
            it that step parameters of their own.
        autocast: dtype of automatic mixed precision for all passes, as a torch dtype or its name.
        exact: take every query row of attention, in place of a sample of them.
        seed: seed of everything that is sampled.
        settings: which checks run, where they speak and by which limits; None for all of them by their own limits.
            No file is read: `normprobe.load_settings()` gives what the command line would find.
        progress: called as `progress(stage, done, total)`.

    Returns:
        The report. A forward that gives NaN is a finding, not an error.

    Raises:
        SettingError: no module; an unknown level, measure, dtype, check or limit; a loss or rate without use; a seed
            that is no int; an optimizer that is none.
        InputError: no inputs could be made; the model rejected them, or the tokenizer or the loss raised (their own
            error is the cause).
    """
    check_model(model)
    tell, settings = progress or (lambda stage, done, total: None), settings or Settings()
    measures = (measures,) if isinstance(measures, str) else measures
    wanted = Wanted(level, measures, loss, lr, exact, seed, tell, optimizer)
    check_wanted(wanted)
    checks.chosen_checks(settings)
    model = unwrapped(model)
    given, description = given_inputs(model, inputs, tokenizer, seed)
    with torch.inference_mode(False), wrappers_aside(model), _precision(model, autocast):
        reading, folds = _read(model, values := on_device(model, given), wanted)
        measured, skipped = _measure(model, values, reading, wanted)
    target = _target(model, description, autocast, reading.anatomy)
    data = ReportData(target=target, level=level, settings=settings)
    return _judge(model, data, reading, _with_foldable(measured, folds), skipped)


def _read(model: nn.Module, inputs: Inputs, wanted: Wanted) -> tuple[Reading, frozenset[str] | None]:
    """The reading, and what `foldable` says of it where the signal is measured too."""
    wanted.tell("record", 0, 0)
    with fewer_collections():
        with rejections(model), valueless_experts(model) as experts:
            trace = record(model, inputs)
        if experts is not None:
            need = "which needs no values of the router: the meta device has none"
            trace.notes.append(f'experts ran in the implementation "{experts}", {need}')
        wanted.tell("identify", 0, 0)
        reading = read(model, trace)
        return reading, None if wanted.level == "structure" else foldable(Survey(model, inputs, trace, reading.anatomy))


def _with_foldable(measured: Measurements, paths: frozenset[str] | None) -> Measurements:
    if paths is None:
        return measured
    gains = tuple(gain.model_copy(update={"foldable": gain.path in paths}) for gain in measured.norm_gains)
    return measured.model_copy(update={"norm_gains": gains})


def _measure(
    model: nn.Module, inputs: Inputs, reading: Reading, wanted: Wanted
) -> tuple[Measurements, tuple[Skipped, ...]]:
    measured, skipped = _measure_model(model, inputs, reading, wanted)
    if isinstance(wanted.optimizer, Optimizer) and measured.optimizer is None:
        known = measure_optimizer(model, reading.anatomy, wanted.optimizer)
        measured = measured.model_copy(update={"optimizer": known})
    return measured, skipped


def _measure_model(
    model: nn.Module, inputs: Inputs, reading: Reading, wanted: Wanted
) -> tuple[Measurements, tuple[Skipped, ...]]:
    if any(p.device.type == "meta" for p in model.parameters()):
        unmeasured = Skipped(what="measurements", why="the model holds no weights (meta device)")
        return Measurements(), () if wanted.level == "structure" else (unmeasured,)
    if wanted.level == "structure":
        gains, skipped = measure_gains(model, reading.anatomy)
        computed, more = measure_computed_weights(model, reading.anatomy)
        return Measurements(norm_gains=gains, computed_weights=computed), (*skipped, *more)
    from normprobe.measures.init_faults import with_blocked  # no reading of the structure waits for them to be loaded
    from normprobe.measures.levels import measure_level

    told = replace(wanted, loss=None if wanted.loss is None else _named(wanted.loss))
    measured, skipped = measure_level(model, inputs, reading.anatomy, told, everywhere=reading.wrote)
    return with_blocked(measured, reading.anatomy, reading.zeros), skipped


def _judge(
    model: nn.Module, data: ReportData, reading: Reading, measured: Measurements, skipped: tuple[Skipped, ...]
) -> Report:
    declared, unasked = with_own(declared_by(model), model, reading.anatomy)
    declared = declared_by_mup(model, reading.anatomy, declared)
    facts = {
        "declared": declared,
        "anatomy": reading.anatomy,
        "measurements": measured,
        "versions": versions(),
        "skipped": (*reading.skipped, *skipped, *unasked),
    }
    return Report(checks.judged(data.model_copy(update=facts), data.settings))


def _named(loss: Loss) -> Loss:
    """`loss`, with what it raises as an InputError that says so."""

    def told(output: Any, inputs: Any) -> Tensor:
        try:
            return loss(output, inputs)
        except Exception as error:
            raise InputError(
                "the given loss raised",
                expected="loss(output, inputs) that returns a scalar tensor computed from the output",
                found=f"{type(error).__name__}: {error}",
            ) from error

    return told


def _precision(model: nn.Module, autocast: str | torch.dtype | None) -> AbstractContextManager[Any]:
    if autocast is None:
        return nullcontext()
    dtype = getattr(torch, autocast, None) if isinstance(autocast, str) else autocast
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SettingError(f"unknown autocast dtype {autocast!r}", expected="bfloat16 or float16")
    device = next((p.device.type for p in model.parameters()), "cpu")
    return torch.autocast("cpu" if device == "meta" else device, dtype=dtype)


def _autocast_in_force(model: nn.Module, autocast: str | torch.dtype | None) -> str | None:
    """The dtype of automatic mixed precision: the argument's, or that of a context around the call."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if autocast is None and device != "meta" and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return None if autocast is None else str(autocast).removeprefix("torch.")


def _target(model: nn.Module, description: str, autocast: str | torch.dtype | None, anatomy: Anatomy) -> Target:
    first = next(model.parameters(), None)
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return Target(
        name=type(model).__name__,
        source="module",
        class_name=type(model).__name__,
        parameters=sum(p.numel() for p in (*model.parameters(), *_integer_weights(model, anatomy))),
        dtype=", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes)),
        device=str(first.device) if first is not None else "cpu",
        inputs=description,
        autocast=_autocast_in_force(model, autocast),
    )


def _integer_weights(model: nn.Module, anatomy: Anatomy) -> list[Tensor]:
    """The buffers of integers that products use as weights, as quantised layers keep them."""
    used = {name for stream in anatomy.streams for branch in stream.branches for name in branch.parameters}
    used |= {anatomy.head.path} if anatomy.head is not None else set()
    return [buffer for name, buffer in model.named_buffers() if name in used and not buffer.is_floating_point()]
