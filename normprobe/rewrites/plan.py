"""Plan rewrites, show them, apply all or none, prove what they did, and take them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, final

from torch import Tensor, nn

from normprobe.capture.invoke import Inputs
from normprobe.errors import InputError, RewriteError
from normprobe.records import Anatomy
from normprobe.rewrites.as_stored import as_stored
from normprobe.rewrites.base import Effect, Rewrite, Site, Sites, Survey
from normprobe.rewrites.choices import Given
from normprobe.rewrites.counts import check_count
from normprobe.rewrites.edits import ForGood
from normprobe.rewrites.fused_path import fused_around, keep_plain
from normprobe.rewrites.history import Applied, Planned
from normprobe.rewrites.proof import Baseline, Proof
from normprobe.rewrites.ran import Running
from normprobe.rewrites.reduced import check_reduced
from normprobe.rewrites.rows import counted, rows_of, shortened
from normprobe.rewrites.unrun import found_by, told_of, unrun

State = Literal["planned", "applied", "undone"]

_MADE_BEFORE = "an optimiser made before, or a DistributedDataParallel,"


def make_plan(model: nn.Module, rewrites: Sequence[Rewrite], inputs: Inputs) -> Plan:
    """What `rewrites` would change in `model`, found from one recorded forward on `inputs`; nothing is changed.

    Automatic mixed precision is left aside here and in `apply`: the model runs in the dtypes that it is stored in.

    Args:
        model: any module; left bit for bit as it was.
        rewrites: applied in this order; each finds its sites in the model as it is now.
        inputs: a tensor, a tuple or a mapping; the proof stands on them too.

    Raises:
        InputError: the model rejected the inputs.
        RewriteError: no rewrite was given, two of them would change the same forward or parameter, or parameters would
            be added or dropped inside a `DistributedDataParallel`.
    """
    if not rewrites:
        raise RewriteError("nothing to plan: no rewrite was given", hint="pass [normprobe.UpcastNorms()], say")
    return plan_on(Survey.of(model, inputs), rewrites)


def plan_on(survey: Survey, rewrites: Sequence[Rewrite]) -> Plan:
    """As `make_plan`, found from a forward that was recorded already.

    Raises:
        RewriteError: as `make_plan`.
    """
    steps = [(rewrite, found_by(rewrite, survey)) for rewrite in rewrites]
    _check_conflicts(steps)
    check_reduced(survey.model, steps)
    return Plan(survey, steps)


def _check_conflicts(steps: Sequence[tuple[Rewrite, Sites]]) -> None:
    owners: dict[str, Rewrite] = {}
    for rewrite, found in steps:
        for claim in (claim for site in found.sites for claim in site.claims):
            if (owner := owners.setdefault(claim, rewrite)) is not rewrite:
                raise RewriteError(
                    f"two rewrites of one plan would change {claim}",
                    expected="each forward and each parameter changed by one rewrite",
                    found=f"{owner.name}, {rewrite.name}",
                    hint="apply one plan, then make the other",
                )


@final
class Plan:
    """Rewrites of one model with their sites; printing it says what will happen before anything moves.

    Attributes:
        steps: each rewrite with its sites.
        state: planned, applied or undone.
        proof: what `apply` did to the outputs; None before it, and for a model without weights (meta device).
        gave: what the model gave then, with choices given as the proof says; None but where there is no undo.
    """

    def __init__(self, survey: Survey, steps: Sequence[tuple[Rewrite, Sites]]) -> None:
        self._model, self._inputs, self._anatomy = survey.model, survey.inputs, survey.anatomy
        self._undo, self._ran = ExitStack(), survey.ran
        self._planned = Planned(survey.model)
        self._applied: Applied | None = None
        self.steps = tuple(steps)
        self._fused = fused_around(self._model, self._sites())
        self._told: list[str] = []
        self._unrun = told_of(unrun(self._model, survey.trace))
        self.state: State = "planned"
        self.proof: Proof | None = None
        self.gave: Mapping[str, Tensor] | None = None

    @property
    def effect(self) -> Effect:
        """The worst effect among the rewrites."""
        return max((rewrite.effect_at(found.sites) for rewrite, found in self.steps), key=lambda effect: effect.rank)

    @as_stored()
    def apply(self, done: Callable[[Site], None] | None = None, room: int | None = None) -> Plan:
        """Change the model in place, confirm every site by reading the model again, and prove the outputs.

        Args:
            done: is told of each site that has changed, and may put its parameters elsewhere; there is no undo then,
                and after an error the model is good for nothing.
            room: bytes that a copy of the model in a wider dtype may take; None for any number.

        Returns:
            This plan.

        Raises:
            RewriteError: the model was changed since the plan was made, by another plan say; a rewrite has no site or
                another number than it expects; a site did not take; an exact rewrite moved the outputs by more than
                rounding explains. The model is then bit for bit as it was.
        """
        if self.state == "applied":
            raise RewriteError("the plan is applied already", hint="call undo() first")
        self.check()
        self._planned.check(self._model, self._names())
        weightless = self._check_weights()
        baseline = None if weightless else self._baseline(room)
        applied = Applied(self._model, self._names()) if done is None else None
        with ExitStack() if applied else ForGood() as undo:
            self._change(undo, done, applied)
            for rewrite, found in self.steps:
                with self._beside(rewrite):
                    rewrite.fit(self._model, found.sites, self._inputs)
            after = baseline.rewritten() if baseline else None
            told = self._confirm(after)
            self.proof = baseline.compare(self._model, self._inputs, after) if baseline else None
            if self.proof is not None and self.proof.holds is False:
                raise self.proof.refusal(self._names())
            if applied:
                applied.stand(self._sites())
            self._undo = undo.pop_all()
        self.gave = after.outputs if after is not None and done is not None else None
        self._applied, self.state, self._told = applied, "applied", told
        return self

    def _baseline(self, room: int | None) -> Baseline:
        ran, self._ran = self._ran, None  # for one time: the model may be trained before the next
        return Baseline.of(self._model, self._inputs, self.effect, self._anatomy, room, ran)

    @as_stored()
    def undo(self, anyway: bool = False) -> None:
        """Put the model back bit for bit; what comes back is in the dtype and on the device that the model has now.

        Args:
            anyway: also where parameters that were written have other values since, because the model was trained:
                they get their old values back, and all others stay as they are now.

        Raises:
            RewriteError: the plan is not applied; a later plan that is still applied, or something else, changed one
                of its modules; a written parameter has other values since. Nothing was changed then.
        """
        if self.state != "applied":
            raise RewriteError(f"nothing to undo: the plan is {self.state}")
        if self._applied is None:
            raise RewriteError("the plan was applied for good", hint="load the model again")
        self._applied.check(anyway)
        self._undo.close()
        self.state = "undone"

    def check(self) -> None:
        """Refuse what `apply` refuses before it moves anything: a rewrite without a place, or with another number.

        Raises:
            RewriteError: a rewrite has no site, or another number than it expects.
        """
        for rewrite, found in self.steps:
            check_count(rewrite, found)

    def _check_weights(self) -> bool:
        """Whether the model holds no weights; what would have to read some is refused then."""
        bare = [name for name, p in self._model.named_parameters() if p.is_meta]
        needing = [rewrite.name for rewrite, found in self.steps if bare and not rewrite.weightless(found.sites)]
        if needing:
            raise RewriteError(
                f"{', '.join(dict.fromkeys(needing))} has to read the weights, and the model holds none",
                expected="parameters with values",
                found=f"{counted(len(bare), 'parameter')} on the meta device, {bare[0]} the first",
                hint="load the weights (or model.to_empty(device=…) and initialise them), then plan again",
            )
        return bool(bare)

    def _change(self, undo: ExitStack, told: Callable[[Site], None] | None, applied: Applied | None) -> None:
        """Every site in order; a failure says where, and unwinds `undo` on its way out."""
        if applied:
            undo.callback(applied.put_back)
        keep_plain(self._model, self._fused)
        done, total = 0, sum(len(found.sites) for _, found in self.steps)
        for rewrite, found in self.steps:
            for site in found.sites:
                where = f"{rewrite.name} failed at {site.path}, site {done + 1} of {total}; the model is as it was"
                with self._beside(rewrite):
                    _change(rewrite, self._model, site, undo, where)
                if told is not None:
                    told(site)
                done += 1
        if applied:
            applied.settle(self._sites(), self._fused)

    def _confirm(self, running: Running[Given] | None) -> list[str]:
        """Every site is as promised; what the rewrites tell of the changed model."""
        anatomy = _read_again(self._model, self._inputs, running)
        for rewrite, found in self.steps:
            with self._beside(rewrite):
                rewrite.confirm(found.sites, anatomy)
        steps = ((rewrite, found.sites) for rewrite, found in self.steps)
        return [line for rewrite, sites in steps for line in rewrite.told(self._model, sites, anatomy)]

    @contextmanager
    def _beside(self, rewrite: Rewrite) -> Iterator[None]:
        """Say of what does not hold that another rewrite of the same plan may be why."""
        try:
            yield
        except RewriteError as error:
            others = ", ".join(dict.fromkeys(other.name for other, _ in self.steps if other is not rewrite))
            if not others:
                raise
            raise RewriteError(
                f"{rewrite.name} does not hold beside {others} in one plan; the model is as it was",
                expected="rewrites that leave each other what they were planned on",
                found=str(error),
                hint="apply one plan, then make the other",
            ) from error

    def _sites(self) -> tuple[Site, ...]:
        return tuple(site for _, found in self.steps for site in found.sites)

    def _names(self) -> str:
        return ", ".join(rewrite.name for rewrite, _ in self.steps)

    def __str__(self) -> str:
        rows = self.rows()
        if not (self.state == "applied" and self._applied is None):
            rows.append(f"undo holds {counted(sum(site.undo_bytes for site in self._sites()), 'byte')}")
        return "\n".join(rows)

    def rows(self, brief: bool = False, planned: bool = False) -> list[str]:
        """What it changes and what that did, line by line; what is said of the line above it is indented further.

        Args:
            brief: whether places that differ by their numbers alone are one line.
            planned: whether nothing is said of what was done since.
        """
        state = "planned" if planned else self.state
        rows = [f"{state}: {self._names()} ({self.effect.value}: {self.effect.meaning})"]
        for rewrite, found in self.steps:
            rows += rows_of(rewrite, found, brief)
        sites = self._sites()
        if any(site.added for site in sites):
            rows.append(f"parameters are added: {_MADE_BEFORE} does not hold them")
        if any(site.gone for site in sites):
            rows.append(f"parameters go: {_MADE_BEFORE} still holds them")
        if self._fused:
            rows.append(f"torch's fused path of {', '.join(self._fused)} is off: it would pass the changed modules by")
        rows += [] if self._unrun is None else [self._unrun]
        rows += shortened([f"now: {line}" for line in self._told if state == "applied"], brief)
        return rows if self.proof is None or planned else [*rows, f"proof: {self.proof}"]


def _change(rewrite: Rewrite, model: nn.Module, site: Site, undo: ExitStack, where: str) -> None:
    try:
        rewrite.change(model, site, undo)
    except RewriteError:
        raise
    except Exception as error:
        raise RewriteError(where, found=f"{type(error).__name__}: {error}") from error


def _read_again(model: nn.Module, inputs: Inputs, running: Running[Given] | None) -> Anatomy:
    try:
        return Survey.of(model, inputs, running).anatomy
    except InputError as error:
        what = "the rewritten model does not run; it is as it was"
        raise RewriteError(what, expected="a forward on the inputs of the plan", found=error.found) from error
