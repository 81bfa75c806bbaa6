"""Whether two models compute the same: their outputs on the same inputs, also in training, and what differs if not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normprobe.errors import CheckpointError, RewriteError
from normprobe.patching.alike.tensors import WITHOUT, Origins, Side
from normprobe.patching.options import room
from normprobe.patching.same import outputs_in_training
from normprobe.records import NormSite
from normprobe.rewrites import Effect, Proof
from normprobe.rewrites.proof import Baseline


def compared(ours: Side, theirs: Side, made: nn.Module, origins: Origins) -> Proof:
    """What `made`, a model of `theirs`, does beside `ours`.

    Raises:
        CheckpointError: the outputs differ by more than rounding explains, or not in training.
    """
    before = Baseline.of(ours.model, ours.inputs, Effect.EXACT, ours.survey.anatomy, room())
    what = f"{ours.called} is no {theirs.called}: every tensor has a place there, but the outputs differ"
    try:
        proof = before.compare(made, ours.inputs)
    except RewriteError as error:
        raise CheckpointError(what, expected=error.expected, found=error.found) from error
    if proof.holds:
        _check_training(ours, theirs, made, proof.tolerance or 0.0)
        return proof
    found = "; ".join((str(proof), *_differences(ours, theirs, origins)))
    raise CheckpointError(what, expected="the same outputs, within rounding", found=found, hint=WITHOUT)


def _differences(ours: Side, theirs: Side, origins: Origins) -> Iterator[str]:
    """What the data flow of the two says differently."""
    norms = [{n.weight: n for n in side.survey.anatomy.norms} for side in (ours, theirs)]
    for name, old in origins.items():
        a, b = norms[0].get(old), norms[1].get(name)
        if a is not None and b is not None and _norm(a) != _norm(b):
            yield f"{a.path}: {_norm(a)}; in {theirs.called} {_norm(b)}"
            break
    sites = (side.survey.anatomy.attention[:1] for side in (ours, theirs))
    for one, other in zip(*sites, strict=False):
        for field in ("heads", "kv_heads", "scale", "softcap", "causal", "window", "biased"):
            told = [getattr(site, field) for site in (one, other)]
            if told[0] != told[1]:
                yield f"{one.path}: {field} {told[0]}; in {theirs.called} {told[1]}"


def _check_training(ours: Side, theirs: Side, made: nn.Module, tolerance: float) -> None:
    """Frozen statistics and dropout show in training alone; nothing is said of a model that draws numbers there."""
    first, second, other = (
        outputs_in_training(model, ours.inputs, seed) for model, seed in ((ours.model, 0), (ours.model, 1), (made, 0))
    )
    drawn = any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    off = max((float((a - b).abs().max()) for a, b in zip(first, other, strict=True)), default=0.0)
    if not drawn and not off <= tolerance:
        what = f"{ours.called} is no {theirs.called}: in training the outputs differ, by dropout or batch statistics"
        raise CheckpointError(what, expected=f"max |Δ| <= {tolerance:.3g}", found=f"{off:.3g}", hint=WITHOUT)


def _norm(norm: NormSite) -> str:
    eps = "" if norm.eps is None else f", eps {norm.eps:.3g}"
    return f"{norm.kind}, {norm.affine}{eps}"
