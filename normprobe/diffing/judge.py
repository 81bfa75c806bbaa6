"""What weights, signals and outputs say, and the verdict over all."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from normprobe.diffing.buffers import BufferPair
from normprobe.diffing.facts import ERROR, NOTE, WARNING, difference, words
from normprobe.diffing.hidden import ELSEWHERE, HIDDEN, hidden_weights, output_parts, same_outputs
from normprobe.diffing.reach import Reach
from normprobe.diffing.values import Apart, Names
from normprobe.records import Initialisation, Severity, Skipped, WeightMeasure
from normprobe.records.diff import (
    DiffData,
    Difference,
    OutputDiff,
    Relation,
    SignalDiff,
    SiteDiff,
    WeightPair,
)
from normprobe.report.wording import number, plural, verb

_SITES = {
    "entry": "the entry of the stream",
    "norm": "what the branch reads",
    "mixed": "what the branch has before its last weight",
    "write": "what the branch writes",
    "stream": "the stream behind the branch",
    "product": "what a weight outside of the streams is multiplied with",
    "head": "what the head reads",
    "output": "the output",
}


def signal_facts(signal: SignalDiff | None, output: OutputDiff | None) -> Iterator[Difference]:
    """The first site that parts, sites that come together again, and outputs that cannot be laid alike."""
    if signal is None:
        return
    apart = output_parts(signal)
    if signal.first is not None and signal.sites[signal.first].kind != "output":
        site = signal.sites[signal.first]
        severity = NOTE if apart is False else ERROR
        again = (
            "; the outputs are the same all the same: the features inside have another basis" if apart is False else ""
        )
        yield difference("signal", "parting", severity, _rms(site), (site.a, site.b), f"{_step(site)}{again}")
    for index in signal.passing:
        site = signal.sites[index]
        told = "the features inside the branch have another order or scale; what it writes is the same"
        yield difference("signal", "inner_form", NOTE, _rms(site), (site.a, site.b), told)
    if apart:
        last = next(site for site in signal.sites if site.kind == "output")
        yield difference("output", "values", ERROR, _rms(last), (last.a, last.b), _step(last, "they part"))
    if output is not None and output.shape_a != output.shape_b and output.shape_a[-1] != output.shape_b[-1]:
        sizes = output.shape_a[-1], output.shape_b[-1]
        yield difference("output", "size", ERROR, sizes, (output.a, output.b))


def of_form(found: Iterable[Difference], signal: SignalDiff | None, reach: Reach | None) -> Iterator[Difference]:
    """Facts of the build as they weigh where the outputs are the same: a factor folded into a weight, keys repeated
    before or inside the attention, are another form of one function. What acts on other inputs alone, by its nature or
    as the outputs do not hang on its part of A for these inputs, stays an error.
    """
    for one in found:
        if not same_outputs(signal) or one.severity is not ERROR or one.fact in ELSEWHERE:
            yield one
        elif reach is not None and not reach.part(one.where[0][0]):
            told = f"{one.message}; {HIDDEN}"
            yield one.model_copy(update={"message": told})
        else:
            told = f"{one.message}; the outputs are the same up to rounding"
            yield one.model_copy(update={"severity": NOTE, "message": told})


def _worst(signal: SignalDiff | None) -> Severity:
    """How bad other values are: a note where the outputs are the same all the same."""
    return NOTE if same_outputs(signal) else ERROR


def _rms(site: SiteDiff) -> tuple[float, float]:
    return site.rms_a, site.rms_b


def _step(site: SiteDiff, what: str = "") -> str:
    told = what or f"the signals part at {_SITES[site.kind]}"
    return (
        f"{told} by {number(site.error)} of its size, where rounding gives {number(site.noise)} "
        f"(limit {number(site.limit)})"
    )


def weight_facts(
    weights: Sequence[WeightPair],
    signal: SignalDiff | None,
    init: Sequence[Initialisation | None],
    apart: Mapping[tuple[Names, Names], Apart],
) -> Iterator[Difference]:
    """Weights that hold other values, one difference for each relation; and other scales of fresh weights.

    Those that `hidden_facts` tells of are left out.
    """
    worst, hidden = _worst(signal), hidden_weights(weights, apart)
    kinds: tuple[tuple[Relation, Severity, str], ...] = (
        ("different", worst, "hold other values"),
        ("unlike", worst, "are there in one model alone or of other shapes"),
        ("scaled", worst, "are those of A times a constant"),
        ("reordered", NOTE, "hold the same output features in another order"),
        ("rounded", NOTE, "are equal after rounding to the narrower dtype or to 16 bits"),
    )
    for relation, severity, told in kinds:
        found = [pair for pair in weights if pair.relation == relation and pair not in hidden]
        if found:
            message = f"{plural(len(found), 'weight')} of {len(weights)} {verb(told, len(found))}"
            yield _related(found, relation, severity, message)
    yield from _drawn(weights, init, NOTE if worst is NOTE else WARNING)


def buffer_facts(buffers: Sequence[BufferPair], signal: SignalDiff | None) -> Iterator[Difference]:
    """Floating buffers that hold other values: rounded tables of rotary angles, running statistics."""
    other = [pair for pair in buffers if pair.relation in ("different", "scaled", "reordered")]
    rounded: dict[tuple[int | None, str], list[BufferPair]] = {}
    for pair in (pair for pair in buffers if pair.relation == "rounded"):
        rounded.setdefault((pair.short, pair.dtype), []).append(pair)
    for (short, dtype), found in rounded.items():
        if short is None:
            told = verb("are equal after rounding", len(found))
        else:
            told = f"{verb('hold', len(found))} in {'AB'[short]} the values of {'BA'[short]} rounded to {dtype}"
        told += f", {number(100 * max(pair.error for pair in found))} % off at most"
        yield _of_buffers("rounded", WARNING, found, f"of {len(buffers)} {told}")
    if other:
        yield _of_buffers("values", _worst(signal), other, f"of {len(buffers)} {verb('differ', len(other))}")


def _of_buffers(fact: str, severity: Severity, found: Sequence[BufferPair], told: str) -> Difference:
    where = tuple((pair.a, pair.b) for pair in found)
    message = f"{plural(len(found), 'floating buffer')} {told}"
    first = difference("weights", f"buffers_{fact}", severity, (None, None), where[0], message)
    return first.model_copy(update={"where": where})


def _related(found: Sequence[WeightPair], relation: Relation, severity: Severity, message: str) -> Difference:
    if relation == "scaled":
        message += f": {', '.join(dict.fromkeys(number(pair.factor) for pair in found[:6]))}"
    if relation in ("different", "scaled"):
        message += f"; distance {number(statistics.median(pair.distance for pair in found))} (median)"
    where = tuple((" + ".join(pair.a), " + ".join(pair.b)) for pair in found)
    fact = "values" if relation == "different" else relation
    first = difference("weights", fact, severity, (None, None), where[0], message)
    return first.model_copy(update={"where": where})


def _drawn(
    weights: Sequence[WeightPair], init: Sequence[Initialisation | None], severity: Severity
) -> Iterator[Difference]:
    """Fresh weights of another scale or distribution: 99.9 % intervals of the standard deviation that do not meet."""
    if init[0] is None or init[1] is None or init[0].trained or init[1].trained:
        return
    named = [{w.parameter: w for w in one.weights} for one in init if one is not None]
    apart: dict[tuple[str, str], list[tuple[WeightMeasure, WeightMeasure]]] = {}
    for pair in (pair for pair in weights if pair.relation in ("different", "scaled")):
        one, other = named[0].get(pair.a[0]), named[1].get(pair.b[0])
        if one is None or other is None or "unknown" in (one.distribution, other.distribution):
            continue
        if max(one.interval[0], other.interval[0]) > min(one.interval[1], other.interval[1]):
            apart.setdefault(("std", one.roles[0]), []).append((one, other))
        elif one.distribution != other.distribution:
            apart.setdefault(("distribution", one.roles[0]), []).append((one, other))
    for (fact, role), found in apart.items():
        values = [statistics.median_low([getattr(each[side], fact) for each in found]) for side in (0, 1)]
        told = f"{plural(len(found), 'weight')} of role {role} {verb('are drawn', len(found))} with {fact} "
        told += f"{words(values[0])} in A and {words(values[1])} in B (medians)"
        where = tuple((one.parameter, other.parameter) for one, other in found)
        first = difference("weights", f"init_{fact}", severity, (values[0], values[1]), where[0], told)
        yield first.model_copy(update={"where": where})


def judge(data: DiffData, *, values: bool, sure: bool) -> DiffData:
    """The document with its verdict.

    Args:
        data: everything that was found.
        values: whether weights, signals and outputs were to be compared.
        sure: whether it is known what the outputs hang on, where they are the same and other facts are not.
    """
    skipped, complete = data.skipped, bool(data.matched)
    if values:
        compared = data.signal is not None and output_parts(data.signal) is not None
        complete = compared and sure
        why = "no output of both models was compared, so that they are not known to be the same"
        skipped = skipped if compared else (*skipped, Skipped(what="verdict", why=why))
    differs = any(one.severity in (ERROR, WARNING) for one in data.differences)
    verdict = "differs" if differs else "same" if complete else "unknown"
    return data.model_copy(update={"verdict": verdict, "complete": complete, "skipped": skipped})
