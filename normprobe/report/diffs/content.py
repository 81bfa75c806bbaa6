"""What a comparison says, in sentences and tables that every form shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from normprobe.records import Severity, Target
from normprobe.records.diff import DiffData, Difference, OutputDiff, SignalDiff, SiteDiff, Subject
from normprobe.report import wording
from normprobe.report.places import joined
from normprobe.report.tables import Table
from normprobe.report.wording import amount, number, plural, tally

_ROOM = 160
_BEFORE, _BEHIND = 2, 5  # sites shown around the first that parts
_MOST = 12
_WHAT = {
    "entry": "entry",
    "norm": "read",
    "mixed": "mixed",
    "write": "write",
    "stream": "sum",
    "product": "read",
    "head": "read by the head",
    "output": "output",
}
_COLUMNS = ("place in A", "error", "rounding", "RMS A", "RMS B", "verdict")
_PARTS: tuple[tuple[Subject, str, str], ...] = (
    ("stream", "residual stream", "residual streams"),
    ("branch", "branch", "branches"),
    ("norm", "norm", "norms"),
    ("attention", "attention site", "attention sites"),
)


def mark(data: DiffData) -> str:
    """✓ for the same, ✗ for another function, ! for other rounding, ? where it is not known."""
    if data.verdict == "differs":
        return "✗" if any(one.severity is Severity.ERROR for one in data.differences) else "!"
    return "✓" if data.verdict == "same" else "?"


def verdict_text(data: DiffData) -> str:
    """The verdict as one sentence."""
    counts = tally(one.severity for one in data.differences)
    if data.verdict == "unknown":
        return "no difference was seen, but not enough was compared to call them the same"
    if data.verdict == "differs":
        errors = any(one.severity is Severity.ERROR for one in data.differences)
        milder = "the same function, rounded otherwise" if data.complete else "not enough was compared to tell more"
        return f"B differs from A: {counts}" + ("" if errors else f" ({milder})")
    told = "the same up to rounding" if data.signal is not None else "the same build; values were not compared"
    if data.output is not None and data.output.max_abs == 0:
        told = "the same, bit for bit on these inputs"
    return told if not data.differences else f"{told}: {counts}"


def level_of(data: DiffData) -> str:
    """The worst severity, else "clean" or "unread": what colours a verdict."""
    if data.verdict != "differs":
        return "clean" if data.verdict == "same" else "unread"
    return min((one.severity for one in data.differences), key=lambda severity: severity.rank).value


def name_of(target: Target) -> str:
    """How a reader calls a model."""
    return target.name or target.class_name or "model"


def title(data: DiffData) -> str:
    """Both models by name."""
    return f"A {name_of(data.a)} · B {name_of(data.b)}"


def model_facts(target: Target) -> list[str]:
    """What one model is, in short."""
    facts = [target.class_name, f"{amount(target.parameters)} parameters", target.dtype, target.device]
    return [fact for fact in facts if fact]


def compared(data: DiffData) -> list[str]:
    """What was held against each other."""
    counts = Counter(match.subject for match in data.matched)
    facts = [plural(counts[part], one, several) for part, one, several in _PARTS if counts[part]]
    if data.weights:
        equal = sum(1 for pair in data.weights if pair.relation == "equal")
        facts.append(f"{plural(len(data.weights), 'weight')}, {equal} of them equal")
    if data.signal is not None:
        narrowed = f", parameters rounded to {data.signal.narrowed} before" if data.signal.narrowed else ""
        facts.append(f"{plural(len(data.signal.sites), 'site')} of the signal in {data.signal.dtype}{narrowed}")
    return facts or ["nothing"]


def places(one: Difference) -> str:
    """The places of a difference; both paths where they are called otherwise."""
    shown = ((wording.place(a) if a else "", wording.place(b) if b else "") for a, b in one.where)
    named = [a or b if not (a and b) or a == b else f"{a} | {b}" for a, b in shown]
    return joined(named, _ROOM)


def heading(one: Difference) -> str:
    """What differs, in two words."""
    return f"{one.subject} {one.fact.replace('_', ' ')}"


def kind(one: Difference) -> str:
    """What differs, as a rule's name: `diff/norm/eps`."""
    return f"diff/{one.subject}/{one.fact}"


def output_facts(output: OutputDiff) -> list[str]:
    """How far the outputs are apart as the models run."""
    names = output.a if output.a == output.b else f"{output.a} | {output.b}"
    dtypes = output.dtype_a if output.dtype_a == output.dtype_b else f"{output.dtype_a} | {output.dtype_b}"
    facts = [f"{names} {' × '.join(map(str, output.shape))}, {dtypes}"]
    facts.append(f"max |Δ| {number(output.max_abs)}, {number(output.max_rel)} of the largest")
    if output.kl is not None:
        facts.append(f"KL {number(output.kl)} nat")
    if output.agreement is not None:
        facts.append(f"same next token {output.agreement:.1%} of {output.tokens}")
    return facts


def tables(data: DiffData) -> Iterator[Table]:
    """The signal site by site, those that tell most."""
    if data.signal is None or not data.signal.sites:
        return
    shown = telling(data.signal)
    rows = tuple(_row(data.signal, index) for index in shown)
    yield Table("Signal", _caption(data.signal, len(shown)), _COLUMNS, rows)


def telling(signal: SignalDiff) -> Sequence[int]:
    """The sites around the first that parts and the last ones; streams evenly over the depth where none does."""
    count = len(signal.sites)
    if count <= _MOST:
        return range(count)
    if signal.first is not None:
        around = range(max(0, signal.first - _BEFORE), min(count, signal.first + _BEHIND))
        return sorted({*around, *signal.passing[:2], count - 2, count - 1})
    sums = [i for i, site in enumerate(signal.sites) if site.kind == "stream"] or list(range(count))
    step = max(1, -(-len(sums) // (_MOST - 4)))
    return sorted({0, *sums[::step], *signal.passing[:2], count - 2, count - 1})


def _caption(signal: SignalDiff, shown: int) -> str:
    told = "relative error, and what one rounding of every weight of A gives there"
    return f"{told}; {shown} of {plural(len(signal.sites), 'site')}" if shown < len(signal.sites) else told


def _row(signal: SignalDiff, index: int) -> tuple[str, ...]:
    site = signal.sites[index]
    numbers = (site.error, site.noise, site.rms_a, site.rms_b)
    return (f"{site.a} {_WHAT[site.kind]}", *map(number, numbers), _said(signal, index, site))


def _said(signal: SignalDiff, index: int, site: SiteDiff) -> str:
    if index == signal.first:
        return "parts first"
    if index in signal.passing:
        return "another form"
    return "not finite" if site.step is None else "parts" if site.step else "same"
