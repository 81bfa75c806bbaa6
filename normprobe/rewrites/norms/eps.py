"""Give norms another eps, inside the root."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from normprobe.capture.calls import CallSpec
from normprobe.errors import RewriteError
from normprobe.norms.identify import identify_module
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, module_at
from normprobe.rewrites.edits import chosen
from normprobe.rewrites.norms.computed import Form, call_of, compute, form_of

_NEAR = 1e-3  # relative: how close an eps that was recovered from behaviour comes to the one that was set


@final
@dataclass(frozen=True)
class SetEps(ChosenRewrite):
    """The eps of norms is set, and moved inside the root: x / √(mean(x²) + eps).

    Where one number of the module alone decides, that is changed, tried out on a copy beforehand; else the norm is
    computed from its closed form with its own gain and offset. What that does to the outputs hangs on how small eps is
    beside the mean squares that come; the proof shows it. A configuration that states an eps is left as it is.

    Attributes:
        eps: the eps; None keeps the number that each norm has, and moves it inside the root where it is not.
        only: a pattern of paths of norms, or several; None for all.
    """

    eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps is not None and not 0 <= self.eps < 1:
            raise RewriteError("SetEps cannot be made", expected="0 <= eps < 1", found=repr(self.eps))

    @property
    def effect(self) -> Effect:
        """Breaking; calibrated where the number stays, and moves inside the root alone."""
        return Effect.CALIBRATED if self.eps is None else Effect.BREAKING

    def describe(self) -> str:
        """What it does, in one line."""
        return "moves eps inside the root" + (
            ", its number stays" if self.eps is None else f" and sets it to {self.eps:g}"
        )

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm with another eps, or with it elsewhere."""
        found = [self._site(survey, norm) for norm in survey.anatomy.norms if chosen(norm.path, self.only)]
        return Sites.of(found)

    def _site(self, survey: Survey, norm: NormSite) -> Site | Refusal | None:
        inside = norm.eps_placement in ("inside_sqrt", "none")
        wanted = norm.eps if self.eps is None else self.eps
        had = 0.0 if norm.eps_placement == "none" else norm.eps
        if norm.kind in ("dyt", "affine", "identity") or not norm.executed or (inside and _equal(had, wanted)):
            return None
        if wanted is None:
            return None if self.eps is None and norm.eps_placement in ("none", "unknown") else _unknown(norm)
        told = "unknown" if had is None else f"{had:.4g}"
        change = f"eps {told} {norm.eps_placement.replace('_', ' ')} becomes {wanted:.4g} inside the root"
        name = _deciding(survey, norm, wanted) if inside else None
        if name is not None:
            return Site(norm.path, f"{change}: its {name}", detail=(name, wanted))
        form = form_of(survey, norm, wanted)
        return Refusal(norm.path, form) if isinstance(form, str) else Site(norm.path, change, detail=(form, wanted))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Set the number that decides, or lay the closed form over the norm."""
        module, (how, wanted) = module_at(model, site.path), site.detail
        if isinstance(how, Form):
            compute(module, how, site.path)
            return
        setattr(module, how, wanted)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as having this eps inside the root."""
        for site in sites:
            norm, wanted = anatomy.norm(site.path), site.detail[1]
            if norm is None or norm.eps_placement not in ("inside_sqrt", "none") or not _equal(norm.eps or 0.0, wanted):
                what, expected = f"SetEps did not take hold at {site.path}", f"eps {wanted:g}"
                if norm is not None and norm.eps_placement == "none":
                    hint = "eps=0, which does the same, or a larger one"
                    raise RewriteError(what, expected=expected, found="no eps: it is lost in rounding", hint=hint)
                found = "no norm" if norm is None else f"eps {norm.eps} {norm.eps_placement.replace('_', ' ')}"
                raise RewriteError(what, expected=expected, found=found)


def _equal(eps: float | None, wanted: float | None) -> bool:
    return eps is not None and wanted is not None and math.isclose(eps, wanted, rel_tol=_NEAR, abs_tol=0.0)


def _unknown(norm: NormSite) -> Refusal:
    return Refusal(norm.path, "its eps could not be recovered; say which it should have with eps=")


def _deciding(survey: Survey, norm: NormSite, wanted: float) -> str | None:
    """The attribute of a norm that its eps alone is taken from, found by changing it on a shell."""
    spec = call_of(survey, norm.path) if norm.module else None
    if spec is None or norm.eps is None:
        return None
    module = module_at(survey.model, norm.path)
    found = [name for name in _numbers(module, norm.eps) if _decides(module, spec, name, wanted)]
    return found[0] if len(found) == 1 else None


def _numbers(module: nn.Module, eps: float) -> Iterator[str]:
    for name, value in module.__dict__.items():
        if isinstance(value, float) and _equal(value, eps):
            yield name


def _decides(module: nn.Module, spec: CallSpec, name: str, wanted: float) -> bool:
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__[name] = wanted
    found = identify_module(twin, spec)
    return found is not None and found.eps_placement in ("inside_sqrt", "none") and _equal(found.eps or 0.0, wanted)
