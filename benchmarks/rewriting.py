"""One rewrite in one model: planned, applied, saved and loaded, copied, read again, and taken back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.flow import holds
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.errors import RewriteError
from normprobe.rewrites import (
    AddFinalNorm,
    AddOutputNorms,
    AddQKNorm,
    Effect,
    Fixup,
    FoldBatchNorm,
    FoldGains,
    FreezeBatchNorm,
    FuseNorms,
    Initialise,
    MuP,
    PlainWeights,
    QKClip,
    RemoveNorms,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    SetEps,
    Site,
    Sites,
    StoreGains,
    Survey,
    ToDyT,
    ToGroupNorm,
    ToPostNorm,
    ToRMSNorm,
    ToSyncBatchNorm,
    UpcastNorms,
)
from normprobe.rewrites.fused_path import fused_around, keep_plain
from normprobe.rewrites.plan import Plan
from normprobe.rewrites.way_back import Structure

SETTINGS: tuple[Rewrite, ...] = (
    UpcastNorms(),
    SetEps(),
    SetEps(1e-3),
    FuseNorms(),
    StoreGains(),
    StoreGains("one_plus_weight"),
    FoldGains(),
    AddFinalNorm(),
    AddOutputNorms(),
    AddOutputNorms(start="calibrated"),
    RemoveNorms(),
    ToDyT(),
    ToRMSNorm(),
    ToRMSNorm(tied="untie"),
    ToPostNorm(),
    ScaleResidual(),
    ScaleResidual("rezero"),
    ScaleResidual("deepnorm"),
    Fixup(),
    Fixup("t_fixup"),
    AddQKNorm(),
    AddQKNorm("l2norm", start="calibrated"),
    QKClip(1e-3),
    Initialise(),
    Initialise("orthogonal"),
    MuP(64),
    Reparametrise(),
    PlainWeights(),
    FreezeBatchNorm(),
    ToSyncBatchNorm(),
    ToGroupNorm(),
    FoldBatchNorm(),
)
PICKS = 2  # branches of each stream whose readers and writers are tried
Said = Literal["applied", "refused", "not needed", "error"]
Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Cell:
    """What became of one rewrite in one model.

    Attributes:
        said: "applied"; "refused" at every place that needs it; "not needed"; "error": what should hold does not.
        refused: the reasons, at all places.
        max_rel: max |Δ| over max |output|; None where nothing was applied.
        errors: what does not hold.
    """

    rewrite: str
    settings: dict[str, Any]
    model: str
    said: Said
    sites: int = 0
    refused: tuple[str, ...] = ()
    max_rel: float | None = None
    errors: tuple[str, ...] = ()

    @staticmethod
    def settings_of(rewrite: Rewrite) -> dict[str, Any]:
        """The settings that are not the default."""
        plain = type(rewrite)().to_dict()
        return {key: value for key, value in rewrite.to_dict().items() if value != plain[key]}


@dataclass
class Subject:
    """A model that rewrites are tried in, one after the other.

    Attributes:
        twin: a copy with other values, that is rewritten equally and then loads what the model's own rewrite saved.
        flowed: whether readers and writers hold in the untouched model.
    """

    name: str
    model: nn.Module
    inputs: Inputs
    survey: Survey = field(init=False)
    twin: nn.Module = field(init=False)
    flowed: bool = field(init=False)

    def __post_init__(self) -> None:
        stir(self.model)
        self.survey = Survey.of(self.model, self.inputs)
        self.twin = copy.deepcopy(self.model)
        stir(self.twin, every=True)
        self.twin_survey = Survey.of(self.twin, self.inputs)
        self.flowed = flows(self.model, self.inputs) is None


@torch.no_grad()
def stir(model: nn.Module, every: bool = False) -> None:
    """Move parameters that hold one number alone by about 0.05, as training would; with `every` all that is saved, by a
    twentieth: equal gains and empty biases would hide what a rewrite does with them."""
    generator, done = torch.Generator().manual_seed(9 if every else 5), set()
    for tensor in model.state_dict(keep_vars=True).values() if every else model.parameters():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel() or id(tensor) in done:
            continue
        done.add(id(tensor))
        noise = torch.randn(tensor.shape, generator=generator).clamp(-3, 3).to(tensor) * 0.05
        if every:
            tensor.mul_(1 + noise)
        elif bool((tensor == tensor.reshape(-1)[0]).all()):
            tensor.add_(noise)


def tried(subject: Subject, rewrite: Rewrite) -> Cell:
    """What becomes of `rewrite` in the model, which is as it was afterwards; an error says what did not hold."""
    name, settings = rewrite.name, Cell.settings_of(rewrite)
    try:
        found = rewrite.sites(subject.survey)
    except Exception as error:
        return Cell(name, settings, subject.name, "error", errors=(f"plan: {reason(error)}",))
    reasons = tuple(each.why for each in found.refused)
    if not found.sites:
        return Cell(name, settings, subject.name, "refused" if reasons else "not needed", refused=reasons)
    max_rel, errors = _applied(subject, rewrite, found)
    said: Said = "error" if errors else "applied"
    return Cell(name, settings, subject.name, said, len(found.sites), reasons, max_rel, tuple(errors))


def _applied(subject: Subject, rewrite: Rewrite, found: Sites) -> tuple[float | None, list[str]]:
    before = snapshot(subject.model)
    plan = Plan(subject.survey, [(rewrite, found)])
    try:
        plan.apply()
    except Exception as error:
        gone = [] if snapshot(subject.model) == before else ["the failure left the model changed"]
        return None, [f"apply: {reason(error)}", *gone]
    errors, proof = [], plan.proof
    assert proof is not None
    if rewrite.effect is Effect.EXACT and proof.holds is False:
        errors.append(f"proof: {proof}")
    for what, check in (("copy", _copied), ("save and load", _loaded), ("readers and writers", _flowing)):
        try:
            fault = check(subject, rewrite, found.sites)
        except Exception as error:
            fault = reason(error)
        errors += [f"{what}: {fault}"] if fault else []
    plan.undo()
    after = snapshot(subject.model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return proof.max_rel, errors + ([f"undo: not as it was: {', '.join(sorted(changed)[:3])}"] if changed else [])


def _copied(subject: Subject, rewrite: Rewrite, sites: tuple[Site, ...]) -> str | None:
    return _unlike(subject.model, copy.deepcopy(subject.model), subject.inputs)


def _loaded(subject: Subject, rewrite: Rewrite, sites: tuple[Site, ...]) -> str | None:
    """Save the state of the rewritten model, rewrite the twin, load it there, compare, and put the twin back."""
    stored, own = io.BytesIO(), {key: value.clone() for key, value in subject.twin.state_dict().items()}
    torch.save(subject.model.state_dict(), stored)
    stored.seek(0)
    found = rewrite.sites(subject.twin_survey)
    if [(each.path, each.added) for each in found.sites] != [(each.path, each.added) for each in sites]:
        found = Sites(sites)  # which places there are hangs on the values: a router's choice of experts, say
    with ExitStack() as undo:
        undo.callback(Structure(subject.twin).put_back)
        keep_plain(subject.twin, fused_around(subject.twin, found.sites))
        for site in found.sites:
            rewrite.change(subject.twin, site, undo)
        subject.twin.load_state_dict(torch.load(stored, weights_only=True))
        fault = _unlike(subject.model, subject.twin, subject.inputs)
    subject.twin.load_state_dict(own)
    return fault


def _flowing(subject: Subject, rewrite: Rewrite, sites: tuple[Site, ...]) -> str | None:
    return flows(subject.model, subject.inputs) if subject.flowed else None


def flows(model: nn.Module, inputs: Inputs) -> str | None:
    """What does not hold of the readers and writers of a model with residual streams; it is put back afterwards."""
    kept = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in kept.parameters():  # what starts at 0 hides its branch
            if parameter.is_floating_point() and not parameter.any():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
                parameter.copy_(noise.to(parameter) * 0.05)
    anatomy = Survey.of(kept, inputs).anatomy
    return holds(kept, inputs, anatomy, PICKS).fault if anatomy.streams else "no stream"


def _unlike(model: nn.Module, other: nn.Module, inputs: Inputs) -> str | None:
    for (name, one), (_, two) in zip(outputs(model, inputs), outputs(other, inputs), strict=True):
        if not torch.equal(one, two) and not bool((one.isnan() & two.isnan() | (one == two)).all()):
            return f"{name} differs by {float((one.double() - two.double()).abs().max()):.3g}"
    return None


def outputs(model: nn.Module, inputs: Inputs) -> Outputs:
    """All floating outputs, with the seed reset; weights that the forward writes, as RWKV does, are put back."""
    with untouched(model) as keeper, torch.no_grad(), keeper.mode():
        torch.manual_seed(1)
        return [(name, t.clone()) for name, t in named_tensors(invoke(model, inputs)) if t.is_floating_point()]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every tensor's identity, dtype and bits, every module's identity, class and own names."""
    facts: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        facts[f"tensor {name}"] = (id(tensor), tensor.dtype, tensor.requires_grad, hash(bits))
    for name, module in model.named_modules():
        facts[f"module {name}"] = (id(module), type(module), sorted(module.__dict__), list(module._modules))
    return facts


def reason(error: BaseException) -> str:
    """Type and message in one line."""
    kind = "" if isinstance(error, RewriteError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:400]


def all_tried(
    name: str, build: Callable[[], tuple[nn.Module, Inputs]], rewrites: Sequence[Rewrite] = SETTINGS
) -> list[Cell]:
    """Every rewrite in one model; after one that could not be taken back the model is built anew."""
    subject, cells = Subject(name, *build()), []
    for rewrite in rewrites:
        cells.append(tried(subject, rewrite))
        if cells[-1].said == "error":
            subject = Subject(name, *build())
    return cells
