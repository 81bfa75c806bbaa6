"""`diff(a, b)`: read both models, match their parts, compare facts, weights, signals and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.capture.parts import Parts
from normprobe.capture.subject import check_model
from normprobe.capture.unwrap import unwrapped, wrappers_aside
from normprobe.diffing.buffers import compare_buffers
from normprobe.diffing.facts import build_facts, grouped, target_facts
from normprobe.diffing.hidden import doubtful, hidden_facts
from normprobe.diffing.inputs import shared_inputs
from normprobe.diffing.judge import buffer_facts, judge, of_form, signal_facts, weight_facts
from normprobe.diffing.norm_facts import norm_facts
from normprobe.diffing.outputs import compare_outputs
from normprobe.diffing.pairs import Pairs, pair
from normprobe.diffing.reach import Reach, reach
from normprobe.diffing.signal import Side, compare_signals
from normprobe.diffing.values import (
    Apart,
    Names,
    compare_weights,
    holdings,
    other_values,
    print_of,
)
from normprobe.errors import SettingError
from normprobe.inputs.given import given_inputs, on_device
from normprobe.measures.extra import Progress
from normprobe.measures.initialisation import measure_initialisation
from normprobe.probing import probe
from normprobe.records import Skipped
from normprobe.records.diff import DiffData, Difference, SignalDiff, WeightPair
from normprobe.report.diffs.report import DiffReport
from normprobe.report.report import Report
from normprobe.version import versions

LEVELS = ("structure", "forward")


def diff(
    a: nn.Module,
    b: nn.Module,
    inputs: Inputs | str | None = None,
    *,
    inputs_b: Inputs | str | None = None,
    tokenizer: Any = None,
    level: str = "forward",
    seed: int = 0,
    progress: Progress | None = None,
) -> DiffReport:
    """Tell in what `b` is not as `a`: norms, placement, attention, head, weights, and where their signals part.

    Parts are matched by their order in the data flow and never by their names, so that a port or a conversion can
    be held against its original. Both models are left bit for bit as they were. Each is recorded once; level
    "forward" takes three more forwards of A and two of B, and one of A with a backward where the outputs are the same
    although weights or facts are not.

    Signals are compared in float32 (float64 where both models are in it), with the weights of both rounded to the
    narrower dtype where their dtypes differ. A site parts where its error is more than eight times what moving every
    weight of A by one rounding does there, and eight spacings of the dtype more.

    Args:
        a: the model that is the reference.
        b: the model that is held against it.
        inputs: of both models: a tensor, a tuple (positional), a mapping (by keyword), a text (with `tokenizer`), or
            None where the config of one of them says enough.
        inputs_b: of B alone, where it takes the same values in another form; made from `inputs` where None.
        tokenizer: called as `tokenizer(text, return_tensors="pt")` for inputs given as a text.
        level: "structure" to run neither model for its values; "forward" for weights, signals and outputs too.
        seed: of what is sampled.
        progress: called as `progress(stage, done, total)`.

    Raises:
        SettingError: no module, or an unknown level.
        InputError: no inputs could be made, or a model rejected them.
    """
    for model in (a, b):
        check_model(model)
    if level not in LEVELS:
        raise SettingError(f"unknown level {level!r}", expected=" | ".join(LEVELS), found=repr(level))
    tell = progress or (lambda stage, done, total: None)
    a, b = unwrapped(a), unwrapped(b)
    of_a, of_b, words, notes = shared_inputs(a, b, inputs, tokenizer, seed)
    if inputs_b is not None:
        of_b, notes = given_inputs(b, inputs_b, tokenizer, seed)[0], ("B has inputs of its own",)
    tell("read A", 0, 0)
    one = _Read.of(a, of_a, seed)
    tell("read B", 0, 0)
    other = _Read.of(b, of_b, seed)
    with torch.inference_mode(False), wrappers_aside(a), wrappers_aside(b):
        return _Diff(one, other, level, seed, tell).report(words, notes)


class _Read(NamedTuple):
    """One model, and the report on its build."""

    side: Side
    report: Report

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, seed: int) -> _Read:
        """Record and read `model`."""
        placed = on_device(model, inputs)
        report = probe(model, placed, level="structure", seed=seed)
        return cls(Side(model, placed, report.anatomy), report)


class _Diff:
    """One comparison while it runs."""

    def __init__(self, a: _Read, b: _Read, level: str, seed: int, tell: Progress) -> None:
        self.a, self.b, self.reports, self.seed, self.tell = a.side, b.side, (a.report, b.report), seed, tell
        meta = any(p.is_meta for side in (self.a, self.b) for p in side.model.parameters())
        self.values = level == "forward" and not meta
        self.level = level
        self.found: list[Difference] = []
        self.skipped: list[Skipped] = []
        self.sure = True

    def report(self, words: str, notes: tuple[str, ...]) -> DiffReport:
        """Compare everything."""
        pairs = pair(self.a.anatomy, self.b.anatomy, print_of(self.a.model), print_of(self.b.model))
        self.skipped += [*self._unread(), *pairs.skipped]
        self._facts(pairs)
        data = DiffData(
            a=self.reports[0].target, b=self.reports[1].target, inputs=words, notes=notes, versions=versions()
        )
        data = data.model_copy(update={"matched": pairs.matched(), "level": "forward" if self.values else "structure"})
        if self.values:
            data = self._values(pairs, data)
        elif self.level == "forward":
            why = 'a model holds no weights (meta device); level "structure" compares the build alone'
            self.skipped.append(Skipped(what="weights, signals and outputs", why=why))
        skipped = tuple(dict.fromkeys(self.skipped))
        told = data.model_copy(update={"differences": grouped(self.found), "skipped": skipped})
        return DiffReport(judge(told, values=self.level == "forward", sure=self.sure))

    def _facts(self, pairs: Pairs) -> None:
        named = [Parts(holdings(side.model)) if self.values else None for side in (self.a, self.b)]
        said = [*target_facts(*(r.target for r in self.reports)), *build_facts(self.a.anatomy, self.b.anatomy, pairs)]
        for each in pairs.norms:
            said += norm_facts(each, named[0], named[1])
        self.found += [one for one in said if isinstance(one, Difference)]
        self.skipped += [one for one in said if isinstance(one, Skipped)]

    def _values(self, pairs: Pairs, data: DiffData) -> DiffData:
        a, b = self.a, self.b
        weights = compare_weights((a.anatomy, holdings(a.model)), (b.anatomy, holdings(b.model)), pairs, self.seed)
        self.tell("compare", 0, 3)
        signal, unseen = compare_signals(a, b, pairs, self.seed, lambda done, of: self.tell("compare", done, of))
        output, lost = compare_outputs(a, b)
        init = [measure_initialisation(side.model, side.anatomy, self.seed)[0] for side in (a, b)]
        reached, apart = self._reached(pairs, weights, signal)
        build, self.found = self.found, [*of_form(self.found, signal, reached)]
        formed = any(was.severity is not now.severity for was, now in zip(build, self.found, strict=True))
        hidden = [*hidden_facts(weights, apart, formed)]
        self.found += [*signal_facts(signal, output), *weight_facts(weights, signal, init, apart)]
        self.found += [one for one in hidden if isinstance(one, Difference)]
        buffers, alone = compare_buffers(a.model, b.model, self.seed)
        self.found += buffer_facts(buffers, signal)
        doubts = [one for one in hidden if isinstance(one, Skipped)]
        self.sure = self.sure and not doubts
        self.skipped += [*unseen, *lost, *doubts, *alone]
        return data.model_copy(update={"weights": weights, "signal": signal, "output": output})

    def _reached(
        self, pairs: Pairs, weights: Sequence[WeightPair], signal: SignalDiff | None
    ) -> tuple[Reach | None, Mapping[tuple[Names, Names], Apart]]:
        """What the outputs hang on, and where weights are apart; asked for only where equal outputs leave a doubt."""
        if not doubtful(self.found, weights, signal):
            return None, {}
        a, b = self.a, self.b
        found = reach(a, b.model, self.seed)
        if isinstance(found, str):
            self.sure = False
            self.skipped.append(Skipped(what="what the outputs hang on, as other facts are not the same", why=found))
            return None, {}
        held = (a.anatomy, holdings(a.model)), (b.anatomy, holdings(b.model))
        return found, other_values(*held, pairs, found.gradients)

    def _unread(self) -> Iterator[Skipped]:
        """What could not be read of either model; checks that wait for values are no part of a comparison."""
        for name, report in zip("AB", self.reports, strict=True):
            for one in report.skipped:
                if not one.what.startswith("NP"):
                    yield one.model_copy(update={"what": f"{name}: {one.what}"})
