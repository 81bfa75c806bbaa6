"""Fold gains and offsets of norms into the weights that read them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.measures.values import plain
from normprobe.records import Anatomy, NormSite, WeightSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey
from normprobe.rewrites.biases import Biases, find_biases
from normprobe.rewrites.edits import PART, Parts, bytes_of, chosen, set_values
from normprobe.rewrites.norms.readers import Readers
from normprobe.rewrites.norms.shared import why_shared

_HALVES = (torch.bfloat16, torch.float16)  # of 8 and 11 digits: the product of two has less than the 24 of float32


@dataclass(frozen=True)
class _Detail:
    norm: NormSite
    weights: tuple[tuple[WeightSite, str | None], ...]  # each with its bias


@final
@dataclass(frozen=True)
class FoldGains(ChosenRewrite):
    """The gain g of a norm is multiplied into the weights that read it, its offset b added to their biases.

    W (g ⊙ n + b) + c = (W diag g) n + (W b + c), so the model computes the same with gains 1 and offsets 0, and
    the spread of the weights shows what they really do (Ashkboos et al. 2024, sec. 3). Refused where anything
    but weights reads the norm, where a weight reads something else too, and where an offset has no bias to go to.

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "gains and offsets of norms go into the weights and biases that read them"

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm whose gain is not 1 everywhere, or whose offset is not 0."""
        if any(p.is_meta for p in survey.model.parameters()):
            raise RewriteError("FoldGains has to read the gains", expected="a model with weights", found="device meta")
        search = _Search(survey)
        found = [search.site(norm) for norm in survey.anatomy.norms if chosen(norm.path, self.only)]
        return Sites.of(found)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Write weights and biases, then gain and offset."""
        norm: NormSite = site.detail.norm
        gain, offset = (None if name is None else _wide(model.get_parameter(name)) for name in (norm.weight, norm.bias))
        if gain is not None and norm.affine.startswith("one_plus"):
            gain = gain + 1
        for weight, bias in site.detail.weights:
            held = model.get_parameter(weight.parameter)
            if bias is not None and offset is not None:
                wide = _wide(held).movedim(weight.output_axis, -2)
                set_values(model.get_parameter(bias), _wide(model.get_parameter(bias)) + wide @ offset, undo)
            if gain is not None:
                set_values(held, _scaled(held.detach(), gain, weight.output_axis), undo)
        for name, value in ((norm.weight, 0.0 if norm.affine.startswith("one_plus") else 1.0), (norm.bias, 0.0)):
            if name is not None:
                set_values(model.get_parameter(name), torch.full_like(model.get_parameter(name), value), undo)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm is still read as the kind that it was."""
        for site in sites:
            norm, had = anatomy.norm(site.path), site.detail.norm
            if norm is None or norm.kind != had.kind:
                found = "no norm" if norm is None else norm.kind
                raise RewriteError(f"FoldGains changed what {site.path} is read as", expected=had.kind, found=found)


def foldable(survey: Survey) -> frozenset[str] | None:
    """Paths of the norms whose gain and offset go into weights, or may have gone there; None where it makes no
    difference: no norm stands at 1 and 0, or every one does, or there are no values."""
    if any(p.is_meta for p in survey.model.parameters()):
        return None
    search = _Search(survey)
    norms = [norm for norm in survey.anatomy.norms if norm.executed and _own(norm)]
    norms = [norm for norm in norms if all(name in search.named and plain(search.named[name]) for name in _own(norm))]
    if len({search.moves(norm) for norm in norms}) < 2:
        return None
    offsets = any(bool(search.named[norm.bias].any()) for norm in norms if norm.bias is not None)
    return frozenset(norm.path for norm in norms if search.takes(norm, offsets))


def _scaled(weight: Tensor, gain: Tensor, output_axis: int) -> Parts:
    """The rows of `weight`, a few at a time, each of their input features times its gain; in float32 where that holds
    the products exactly."""
    if weight.dtype in _HALVES and bool((gain == gain.to(weight.dtype)).all()):
        gain = gain.float()
    rows = weight.reshape(-1, weight.shape[-1])
    by_row = output_axis == weight.dim() - 1  # then a row is an input feature of a matrix, else it has one of each
    width, many = rows.shape[1], max(1, PART // rows.shape[1])

    def scaled(start: int) -> Tensor:
        first = start // width
        part = rows[first : first + many].to(gain.dtype)
        if not by_row:
            return part * gain
        return part * gain[torch.arange(first, first + len(part), device=gain.device) % len(gain)].unsqueeze(-1)

    return Parts(many * width, scaled)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64))


class _Search:
    """Finds what a norm's gain and offset go into."""

    def __init__(self, survey: Survey) -> None:
        self.survey, self.model, self.readers = survey, survey.model, Readers(survey)
        named = dict(survey.model.named_parameters(remove_duplicate=False))
        self.named = named
        self.biases: Biases = find_biases(survey, named)

    def site(self, norm: NormSite) -> Site | Refusal | None:
        """The site of a norm, why it has none, or None where there is nothing to fold."""
        names = _own(norm)
        if not norm.executed or not names or not self.moves(norm):
            return None
        offset = None if norm.bias is None else self.named.get(norm.bias)
        found = self._weights(norm, offset is not None and bool(offset.any()))
        if isinstance(found, str):
            return Refusal(norm.path, found)
        touched = [*names, *(name for weight, bias in found for name in (weight.parameter, bias) if name is not None)]
        every = tuple(dict.fromkeys(touched))
        change = "goes into " + ", ".join(weight.parameter for weight, _ in found)
        held = bytes_of(self.model, every)
        return Site(norm.path, change, every, forward=False, undo_bytes=held, detail=_Detail(norm, found))

    def takes(self, norm: NormSite, offsets: bool) -> bool:
        """Whether weights take its gain, and an offset where norms of this model have some."""
        return not isinstance(self._weights(norm, offsets and norm.bias is not None), str)

    def moves(self, norm: NormSite) -> bool:
        """Whether gain or offset do anything."""
        unit = 0.0 if norm.affine.startswith("one_plus") else 1.0
        pairs = ((norm.weight, unit), (norm.bias, 0.0))
        return any(name not in self.named or bool((self.named[name] != value).any()) for name, value in pairs if name)

    def _weights(self, norm: NormSite, biased: bool) -> tuple[tuple[WeightSite, str | None], ...] | str:
        """What takes the gain, each with the bias that takes the offset, which it has to have if `biased`."""
        why = self._why_not(norm)
        found = self.readers.of(norm) if why is None else why
        if isinstance(found, str):
            return found
        pairs = []
        for weight in found:
            if not {"reader", "head", "inner", "other"}.issuperset(weight.roles) or weight.parameter not in self.named:
                return f"{weight.parameter} is used elsewhere too ({', '.join(weight.roles)})"
            biases = self.biases.get(weight.parameter, ())
            fits = len(biases) == 1 and not biases[0].scaled
            if biased and not fits:
                found = "the bias behind a factor" if len(biases) == 1 else f"{len(biases) or 'no'} biases"
                return f"its offset has nowhere to go: {weight.parameter} has {found}"
            pairs.append((weight, biases[0].parameter if fits and norm.bias is not None else None))
        return tuple(pairs)

    def _why_not(self, norm: NormSite) -> str | None:
        if not norm.module:
            return "it is written out inside another module's forward"
        if norm.axes != (-1,) or norm.affine == "other":
            return f"its gain could not be read as one of each feature (axes {norm.axes}, affine {norm.affine})"
        names = _own(norm)
        if any(name not in self.named for name in names):
            return f"{', '.join(names)}: its gain or offset is a part of a parameter"
        held = {name: self.named[name] for name in names}
        for name, tensor in held.items():
            if tensor.dim() != 1:
                return f"{name}: shape (features,) expected, found {tuple(tensor.shape)}"
            if not tensor.is_floating_point():
                return f"{name}: floating numbers expected, found {tensor.dtype}"
        return why_shared(self.survey, norm)


def _own(norm: NormSite) -> tuple[str, ...]:
    return tuple(name for name in (norm.weight, norm.bias) if name is not None)
