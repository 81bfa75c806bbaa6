"""`normprobe explain`: the page of a check, what the measures cost, the recipes of initialisation; without torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from normprobe.cli import options as opt
from normprobe.cli.docstrings import as_markdown
from normprobe.cli.outcome import outcome
from normprobe.cli.output import show
from normprobe.errors import SettingError
from normprobe.records.extras import ABOUT, EXTRA_NAMES

_MEASURES, _RECIPES, _REWRITES = "measures", "recipes", "rewrites"
_LEVELS = Text(
    "An audit runs the model twice: one forward that is recorded, one that is measured; two forwards more where the "
    "output or a stream is not finite. --level structure: the first alone. --backward: one forward and one backward "
    "more, twice that where a gradient is not finite. --exact: no pass more. --measures: what follows, beyond these; "
    "--deep: all of it.\n"
)
_STDS = Text(
    "The table of the initialisation names, for each group of weights, the recipes whose standard deviation theirs "
    "fits. d is the width of the stream, N the number of writes to it, L its blocks, l the number of a block from 1, "
    "m the weights on the way through a branch, β that of DeepNorm.\n"
)


def explain(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC",
            help="A check (NP201, missing-final-norm), measures or one of these, rewrites or one of these (SetEps), or "
            "recipes.",
        ),
    ],
    debug: opt.Debug = False,
) -> None:
    """Say what a check measures, why it matters, what to do, and when to ignore it.

    For "measures" or one of them: what each further measure tells, and how many passes over the model it takes. For
    "recipes": the initialisations that the report names, with their formulas and sources. For "rewrites": what each
    does, in a line; for one of them its settings too.
    """
    with outcome(debug=debug):
        show(_page(topic))


def _page(topic: str) -> RenderableType:
    word = topic.strip().lower()
    if word == _MEASURES:
        return Group(_LEVELS, _measures(EXTRA_NAMES))
    if word == _RECIPES:
        return Group(_STDS, _recipes())
    if word == _REWRITES:
        return Group(_rewrites(), Text("\nnormprobe explain SetEps tells of one, with its settings.", style="dim"))
    if word in ABOUT:
        asked = Text(f"\nAsk for it with --measures {word}; normprobe explain {_MEASURES} lists all.", style="dim")
        return Group(_measures([word]), asked)
    from normprobe import checks
    from normprobe.checks.pages import page_place

    try:
        check = checks.find(topic, also=(_MEASURES, _RECIPES, _REWRITES, *EXTRA_NAMES))
    except SettingError as error:
        return _by_docstring(word, error)
    return Group(Markdown(checks.documentation(check)), Text(f"\nAlso in {page_place(check)}", style="dim"))


def _by_docstring(word: str, unknown: SettingError) -> RenderableType:
    """What a rewrite does, or anything else that normprobe offers in Python; it takes torch.

    Raises:
        SettingError: there is nothing of this name, in any case: `unknown`, or one with the name that may be meant.
    """
    import normprobe
    from normprobe.rewrites import ALL

    known = [kind.name for kind in ALL] + list(normprobe.__all__)
    names = {name.lower(): name for name in known if callable(getattr(normprobe, name))}
    if word not in names:
        near = get_close_matches(word, [_MEASURES, _RECIPES, _REWRITES, *EXTRA_NAMES, *names], 1)
        if not near or near[0] not in names:
            raise unknown
        hint = f"did you mean {names[near[0]]}?"
        raise SettingError(unknown.message, expected=unknown.expected, hint=hint) from None
    name = names[word]
    page = Markdown(as_markdown(name, getattr(normprobe, name)))
    if name not in {kind.name for kind in ALL}:
        return Group(page, Text(f"\nnormprobe.{name}, in Python", style="dim"))
    below = (Text(), _schemes()) if name == "Initialise" else ()
    return Group(page, *below, Text(f"\nnormprobe.rewrite(model, [normprobe.{name}(…)]) applies it", style="dim"))


def _rewrites() -> Table:
    from normprobe.rewrites import ALL

    table = _columns("rewrite", "what it does", "by default")
    for kind in ALL:
        first, *_ = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
        effect = kind.usual if hasattr(kind, "usual") else kind().effect
        table.add_row(Text(kind.name, style="bold"), Text(" ".join(first.replace("`", "").split())), Text(effect.value))
    return table


def _schemes() -> Table:
    from normprobe.rewrites.initialise.schemes import SCHEMES

    table = _columns("scheme", "standard deviation", "source")
    for scheme in SCHEMES.values():
        table.add_row(Text(scheme.name, style="bold"), Text(scheme.about), Text(scheme.source))
    return table


def _measures(names: Iterable[str]) -> Table:
    table = _columns("measure", "what it tells", "passes")
    for name, about in ABOUT.items():
        if name in names:
            table.add_row(Text(name, style="bold"), about.tells, about.passes)
    return table


def _recipes() -> Table:
    from normprobe.measures.recipes import ORTHOGONAL, RECIPES

    table = _columns("recipe", "standard deviation", "source")
    for recipe in (*RECIPES, *ORTHOGONAL):
        table.add_row(Text(recipe.name, style="bold"), recipe.formula, recipe.source)
    return table


def _columns(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title)
    return table
