"""The measured pass: residual streams and attention logits in one forward; and how the weights were drawn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from normprobe.capture.guard import without_autocast
from normprobe.capture.invoke import Inputs
from normprobe.capture.watch import Handler, Watched, watch
from normprobe.measures.attention import LogitHandler, alike, tell
from normprobe.measures.bounded import bend_handlers, read_bends
from normprobe.measures.computed_weights import measure_computed_weights
from normprobe.measures.entries import EntryHandler, entry_handlers
from normprobe.measures.finite import all_finite, first_broken_module
from normprobe.measures.gains import measure_gains
from normprobe.measures.initialisation import measure_initialisation
from normprobe.measures.origin import broken_tensors, first_broken_operation
from normprobe.measures.padding import padding_masks, undecided
from normprobe.measures.residual import read_stream, write_handlers
from normprobe.measures.scratch import Scratch
from normprobe.measures.together import Together
from normprobe.measures.writes import WriteHandler
from normprobe.records import Anatomy, AttentionMeasure, Measurements, OpSite, Skipped, StreamMeasure


def measure_forward(
    model: nn.Module, inputs: Inputs, anatomy: Anatomy, seed: int = 0, *, exact: bool = False, everywhere: bool = True
) -> tuple[Measurements, tuple[Skipped, ...]]:
    """`measure_signal`, and the gains of the norms and how the weights were drawn, for which nothing runs."""
    measured, skipped = measure_signal(model, inputs, anatomy, seed, exact=exact, everywhere=everywhere)
    if _on_meta(model):
        return measured, skipped
    with without_autocast():
        gains, odd = measure_gains(model, anatomy)
        computed, hidden = measure_computed_weights(model, anatomy)
        init, unread = measure_initialisation(model, anatomy, seed)
    stored: dict[str, Any] = {"norm_gains": gains, "computed_weights": computed, "init": init}
    stored["non_finite_tensors"] = broken_tensors(model)
    return measured.model_copy(update=stored), (*skipped, *odd, *hidden, *unread)


def measure_signal(
    model: nn.Module, inputs: Inputs, anatomy: Anatomy, seed: int = 0, *, exact: bool = False, everywhere: bool = True
) -> tuple[Measurements, tuple[Skipped, ...]]:
    """Measure every residual stream and attention site of `anatomy` in one forward of `model`.

    The model runs in eval mode without gradients and is left bit for bit as it was, also when its forward
    raises (that error passes through). Where a stream or an output is not finite, two more forwards find
    the first module that broke it and the operation in it. On the meta device there is nothing to measure.

    Args:
        model: the model that `anatomy` was read from.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        anatomy: what to measure.
        seed: of the samples of query rows and tokens.
        exact: take every query row.
        everywhere: as in `watch`: False where the recorded forward wrote into no parameter.

    Returns:
        The measurements, and what could not be measured with the reason.
    """
    if _on_meta(model):
        return Measurements(), (Skipped(what="the signal", why="tensors on the meta device hold no numbers"),)
    padding = padding_masks(inputs)
    writes = {stream.name: write_handlers(stream, padding, seed) for stream in anatomy.streams}
    together, scratch = Together(tell, alike), Scratch()
    logits = [(site.site, LogitHandler(site, seed, padding, exact, together, scratch)) for site in anatomy.attention]
    handlers: dict[OpSite, Handler] = {h.qk.product.site: h.qk for _, h in logits if h.qk is not None}
    handlers.update(logits)
    entries = entry_handlers(anatomy)
    handlers.update(entries)
    bends = bend_handlers(anatomy, seed, padding)
    handlers.update(bends.values())
    for per_stream in writes.values():
        handlers.update(per_stream)
    watched = watch(model, inputs, handlers, everywhere=everywhere)
    with without_autocast():
        streams, skipped = _streams(anatomy, writes, logits, watched)
        streams = tuple(map(partial(_with_entries, anatomy, entries), streams))
        attention, unseen = _attention(logits, watched)
        bounded, unbent = read_bends(bends, watched)
    finite = _finite(model, inputs, streams, watched)
    if finite["output_finite"] is None:
        unseen.append(Skipped(what="outputs", why="the model returned no floating point tensor"))
    everything = (*undecided(padding), *skipped, *unseen, *unbent)
    return Measurements(residual=streams, attention=attention, bounded_norms=bounded, **finite), everything


def _on_meta(model: nn.Module) -> bool:
    return any(p.device.type == "meta" for p in model.parameters())


def _finite(model: nn.Module, inputs: Inputs, streams: tuple[StreamMeasure, ...], watched: Watched) -> dict[str, Any]:
    """Whether the output is finite, and where the first value that is not came from."""
    finite = all_finite(watched.output)
    broken = next((s.path.partition("#")[0] for stream in streams for s in stream.states if not s.finite), None)
    if finite is not False and broken is None:
        return {"output_finite": finite}
    broken = first_broken_module(model, inputs) or broken
    return {
        "output_finite": finite,
        "first_non_finite": broken,
        "first_non_finite_operation": None if broken is None else first_broken_operation(model, inputs, broken),
    }


def _streams(
    anatomy: Anatomy,
    writes: Mapping[str, Mapping[OpSite, WriteHandler]],
    logits: list[tuple[OpSite, LogitHandler]],
    watched: Watched,
) -> tuple[tuple[StreamMeasure, ...], list[Skipped]]:
    lengths = {handler.length for _, handler in logits if handler.length}
    measures: list[StreamMeasure] = []
    skipped: list[Skipped] = []
    for stream in anatomy.streams:
        measure, unseen = read_stream(stream, writes[stream.name], watched, lengths)
        skipped += unseen
        if measure is not None:
            measures.append(measure)
    return tuple(measures), skipped


def _with_entries(anatomy: Anatomy, entries: Mapping[OpSite, EntryHandler], measure: StreamMeasure) -> StreamMeasure:
    """The measure with what the first weights of its branches were given."""
    branches = next(stream.branches for stream in anatomy.streams if stream.name == measure.stream)
    states = []
    for state in measure.states:
        entry = branches[state.branch].entry
        seen = None if entry is None or entry.site not in entries else entries[entry.site].std
        states.append(state if seen is None else state.model_copy(update={"input_std": seen}))
    return measure.model_copy(update={"states": tuple(states)})


def _attention(
    logits: list[tuple[OpSite, LogitHandler]], watched: Watched
) -> tuple[tuple[AttentionMeasure, ...], list[Skipped]]:
    measures: list[AttentionMeasure] = []
    skipped: list[Skipped] = []
    for site, handler in logits:
        measure = handler.measure
        if measure is not None:
            measures.append(measure)
        else:
            why = watched.reason(site) or handler.failed or "the handler was told of no arguments"
            skipped.append(Skipped(what=f"attention logits {site.path}#{site.op}:{site.ordinal}", why=why))
    return tuple(measures), skipped
