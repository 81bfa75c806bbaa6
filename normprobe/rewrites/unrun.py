"""What did not run on the inputs of a plan: every plan names it, and no exact rewrite changes what it may stand in for.

Which parameters ran is known from the trace. A module of which none ran, beside one of the same class and shapes that
is edited, may be what runs in its place on other inputs: it would then meet what was edited to go with the other one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normprobe.capture.trace import Trace
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Rewrite, Site, Sites, Survey
from normprobe.rewrites.choosing import check_choice
from normprobe.rewrites.wrapped import plain_sites

_NAMED = 4


def unrun(model: nn.Module, trace: Trace) -> tuple[str, ...]:
    """The parameters that no operation of the recorded forward read, tied ones by their first name."""
    ran = {node.name for node in trace.nodes if node.op == "parameter"}
    read = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in ran}
    return tuple(name for name, p in model.named_parameters() if id(p) not in read)


def told_of(names: tuple[str, ...]) -> str | None:
    """What a plan says of parameters that did not run; None where all did."""
    if not names:
        return None
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    shown = ", ".join(names[:_NAMED])
    return f"{count} did not run on these inputs, and no proof covers what they compute: {shown}{more}"


def found_by(rewrite: Rewrite, survey: Survey) -> Sites:
    """The sites of `rewrite` at plain parameters; where it is exact without those that hold only for what ran here.

    Raises:
        RewriteError: a pattern of its `only` covers no place of the model.
    """
    if isinstance(rewrite, ChosenRewrite) and rewrite.only is not None and rewrite.expect != 0:
        check_choice(rewrite.name, rewrite.only, rewrite.places(survey))
    found = plain_sites(rewrite, survey.model, rewrite.sites(survey))
    if rewrite.effect is not Effect.EXACT or not found.sites:
        return found
    idle = frozenset(unrun(survey.model, survey.trace))
    edited = {name for site in found.sites for name in _edited(site)}
    groups = [found.sites] if rewrite.TOGETHER else [(site,) for site in found.sites]
    kept: list[Site] = []
    refused = list(found.refused)
    for group in groups:
        beside = next(_beside(survey.model, group, idle, edited), None) if idle else None
        if beside is None:
            kept += group
            continue
        own, other = beside
        why = f"{other} beside {own} did not run and may take its place: plan on inputs that run it (more tokens)"
        refused += [Refusal(path, why) for path in dict.fromkeys(site.path for site in group)]
    return Sites(tuple(kept), tuple(refused), found.notes)


def _edited(site: Site) -> tuple[str, ...]:
    return (*site.touched, *site.gone)


def _beside(
    model: nn.Module, group: tuple[Site, ...], idle: frozenset[str], edited: set[str]
) -> Iterator[tuple[str, str]]:
    """Modules with an edited parameter, and one beside each that did not run, is alike and is not edited alike.

    Only below the module that holds all of the group: what stands beside that one brings its own of everything.
    """
    names = {name for site in group for name in _edited(site)}
    owners = {name.rpartition(".")[0] for name in names}
    held = {*owners, *(name.rpartition(".")[0] for site in group for name in site.added)}
    depth = len(_common([path.split(".") for path in {*held, *(_plain(site.path) for site in group)}]))
    for owner in sorted(owners):
        parts = owner.split(".") if owner else []
        for end in range(depth + 1, len(parts) + 1):
            own, parent = ".".join(parts[:end]), ".".join(parts[: end - 1])
            for other in _alike(model, parent, parts[end - 1]):
                theirs = [name for name, _ in model.get_submodule(other).named_parameters(prefix=other)]
                like = {other + name.removeprefix(own) for name in names if name.startswith(own + ".")}
                if theirs and idle.issuperset(theirs) and not like <= edited:
                    yield own, other


def _plain(path: str) -> str:
    return "" if path == "." else path


def _common(paths: list[list[str]]) -> list[str]:
    """The parts that all paths begin with; none where one of them is the root."""
    if any(parts == [""] for parts in paths):
        return []
    first, last = min(paths), max(paths)
    return [a for i, (a, b) in enumerate(zip(first, last, strict=False)) if first[: i + 1] == last[: i + 1]]


def _alike(model: nn.Module, parent: str, own: str) -> Iterator[str]:
    """The modules beside `own` of the same class, whose parameters have the same names and shapes."""
    children = dict(model.get_submodule(parent).named_children())
    for name, child in children.items():
        if name != own and type(child) is type(children[own]) and _shapes(child) == _shapes(children[own]):
            yield f"{parent}.{name}" if parent else name


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]
