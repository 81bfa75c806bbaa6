"""Where the signals of two models part on the same inputs, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from normprobe.capture.invoke import Inputs
from normprobe.capture.outputs import named_tensors
from normprobe.capture.watch import watch
from normprobe.diffing.pairs import Pairs
from normprobe.diffing.settings import Setting, in_setting, settings
from normprobe.diffing.sites import RETURNED, Looks, Site, Tap, find_sites, handlers
from normprobe.diffing.sketch import Sketch, Sketcher, cosine, error
from normprobe.measures.padding import padding_masks
from normprobe.records import Anatomy, Skipped
from normprobe.records.diff import SignalDiff, SiteDiff

TIMES = 8.0  # choice: noise of one random rounding of the weights, against that of every operation on the way
FLOOR = 8.0  # choice: spacings of the dtype; what two ways to write one operation differ by behind equal inputs


@dataclass(frozen=True)
class Side:
    """One of the two models with its inputs and its Anatomy."""

    model: nn.Module
    inputs: Inputs
    anatomy: Anatomy


def compare_signals(
    a: Side, b: Side, pairs: Pairs, seed: int, tell: Callable[[int, int], None]
) -> tuple[SignalDiff | None, tuple[Skipped, ...]]:
    """Run A, A with its weights moved by one rounding, and B, and compare them at every site that both have.

    Three forwards. Of a state of many elements random sums are kept, so that the memory does not grow with the
    states; every element is in them.

    Args:
        a: the model that errors are relative to and that gives the noise.
        b: the other model.
        pairs: the parts that belong together.
        seed: of the random signs.
        tell: called with passes done and passes in all.

    Returns:
        None where neither setting runs, with the reason.
    """
    sites = find_sites(a.anatomy, b.anatomy, pairs)
    skipped: list[Skipped] = []
    for setting in settings(a.model, b.model):
        try:
            found, unseen = _compared(a, b, sites, setting, seed, tell)
        except Exception as problem:  # a foreign model may refuse another dtype in any way; the reason is told
            why = f"the models do not run so: {type(problem).__name__}: {problem}"
            skipped.append(Skipped(what=f"signals in {_name(setting)}", why=why))
        else:
            return found, (*skipped, *unseen)
    return None, tuple(skipped)


def _name(setting: Setting) -> str:
    return "the models' own dtypes" if setting.dtype is None else str(setting.dtype).removeprefix("torch.")


def _compared(
    a: Side, b: Side, sites: Sequence[Site], setting: Setting, seed: int, tell: Callable[[int, int], None]
) -> tuple[SignalDiff, list[Skipped]]:
    sketcher = Sketcher(seed)
    taps = [site.a for site in sites], [site.b for site in sites]
    tell(0, 3)
    first, missed = _pass(a, taps[0], Looks(sketcher, padding_masks(a.inputs)), setting, None)
    tell(1, 3)
    noisy, _ = _pass(a, taps[0], Looks(sketcher, padding_masks(a.inputs)), setting, seed)
    tell(2, 3)
    wanted = {site.b: first.sketches[site.a].shape for site in sites if site.a in first.sketches}
    returned = next((first.sketches[tap].shape for tap in first.sketches if tap.site == RETURNED), None)
    looks = Looks(sketcher, padding_masks(b.inputs), wanted, returned)
    other, unseen = _pass(b, taps[1], looks, setting, None)
    order = _order(sites, first)
    rows, skipped = [], [Skipped(what=f"signal at {path}", why=why) for path, why in (missed | unseen).items()]
    for site in sorted([*sites, *_returned(first, other)], key=lambda one: order.get(one.a, -1)):
        if site.b in other.unlike:
            why = f"another layout: {other.unlike[site.b]}"
            skipped.append(Skipped(what=f"signal at {site.a.path} and {site.b.path}", why=why))
        elif site.a in first.sketches and site.a in noisy.sketches and site.b in other.sketches:
            rows.append(_row(site, first.sketches[site.a], noisy.sketches[site.a], other.sketches[site.b], setting))
    for tap, shapes in other.unlike.items():
        if tap.site == RETURNED:
            skipped.append(Skipped(what="signal at the output", why=f"another layout: {shapes}"))
    parting, passing = first_parting(rows)
    narrowed = None if setting.narrow is None else str(setting.narrow).removeprefix("torch.")
    signal = SignalDiff(dtype=_name(setting), narrowed=narrowed, sites=tuple(rows), first=parting, passing=passing)
    return signal, skipped


def _order(sites: Sequence[Site], looks: Looks) -> dict[Tap, float]:
    """When each tap was seen; the entry of a stream, seen at the first add, counts before what reads it."""
    order: dict[Tap, float] = {tap: place for place, tap in enumerate(looks.sketches)}
    for entry in (site for site in sites if site.kind == "entry"):
        own = [order[site.a] for site in sites if site.stream == entry.stream and site.a in order]
        if entry.a in order:
            order[entry.a] = min(own) - 0.5
    return order


def _pass(
    side: Side, taps: Sequence[Tap], looks: Looks, setting: Setting, seed: int | None
) -> tuple[Looks, dict[str, str]]:
    """What one forward showed, and the places that it did not reach with the reason."""
    with in_setting(side.model, side.inputs, setting, seed) as inputs:
        at = handlers(looks, taps, side.model)
        watched = watch(side.model, inputs, at)
        for name, tensor in floating_outputs(watched.output)[:1]:
            looks.at(Tap(RETURNED, "sum", name), tensor)
    reasons = {site.path: why for site in at if (why := watched.reason(site)) is not None}
    return looks, reasons


def floating_outputs(output: object) -> list[tuple[str, Tensor]]:
    """The floating tensors with elements that a model returned, by name."""
    return [(name, t) for name, t in named_tensors(output) if t.is_floating_point() and t.numel()]


def _returned(a: Looks, b: Looks) -> list[Site]:
    """What both models return first."""
    taps = [next((tap for tap in looks.sketches if tap.site == RETURNED), None) for looks in (a, b)]
    return [Site("output", taps[0], taps[1])] if taps[0] is not None and taps[1] is not None else []


def _row(site: Site, a: Sketch, noisy: Sketch, b: Sketch, setting: Setting) -> SiteDiff:
    apart, noise = error(a, b), error(a, noisy)
    limit = TIMES * (noise if math.isfinite(noise) else 0.0) + FLOOR * setting.spacing
    return SiteDiff(
        kind=site.kind,
        a=site.a.path,
        b=site.b.path,
        stream=site.stream,
        block=site.block,
        branch=site.branch,
        error=apart,
        noise=noise,
        limit=limit,
        step=None if math.isnan(apart) else not apart <= limit,
        rms_a=a.rms,
        rms_b=b.rms,
        cosine=cosine(a, b),
        count=a.count,
        exact=a.exact,
    )


_INNER = ("norm", "mixed")


def first_parting(rows: Sequence[SiteDiff]) -> tuple[int | None, tuple[int, ...]]:
    """The first site that parts for good, and those that come together again.

    A site inside a branch comes together again where the write of its branch does not part: its features stand in
    another order, or a gain is folded into the weight behind it.
    """
    passing = []
    for index, row in enumerate(rows):
        if not row.step:
            continue
        if row.kind in _INNER and _write(rows, index) is False:
            passing.append(index)
            continue
        later = [i for i, other in enumerate(rows) if i > index and other.kind in _INNER and other.step]
        return index, tuple(passing + [i for i in later if _write(rows, i) is False])
    return None, tuple(passing)


def _write(rows: Sequence[SiteDiff], index: int) -> bool | None:
    """Whether what the branch of an inner site writes parts; None where that was not seen."""
    own = rows[index]
    for row in rows[index + 1 :]:
        if row.kind in ("write", "stream") and (row.stream, row.branch) == (own.stream, own.branch):
            return row.step
    return None
