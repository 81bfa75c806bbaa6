"""`normprobe diff A B`: load two targets, compare them, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from normprobe.cli import options as opt
from normprobe.cli.interrupt import at_once
from normprobe.cli.outcome import CLEAN, FAILED, FINDINGS, outcome, stderr
from normprobe.cli.output import pick, put, quiet_stdout, show
from normprobe.cli.progress import progress
from normprobe.errors import InputError, SettingError
from normprobe.report.files import check_place, write_whole
from normprobe.report.formats import Format

if TYPE_CHECKING:
    from normprobe.report.diffs.report import DiffReport
    from normprobe.targets import Loaded, TargetOptions

_CONFIGURATION, _STORED = "config", ("folder", "hub", "gguf")  # sources of targets, as the loaders name them
_TARGET = "As for audit: hub id, folder, config.json, .gguf, path/file.py:factory or package.module:factory."
First = Annotated[str, typer.Argument(metavar="A", help=_TARGET, show_default=False)]
Second = Annotated[str, typer.Argument(metavar="B", help="What is held against A.", show_default=False)]
RevisionB = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Revision of B, where it is another one.", rich_help_panel="What to load", show_default=False),
]
DtypeB = Annotated[
    Optional[opt.DtypeChoice],  # noqa: UP045
    typer.Option(help="Dtype of B, where it is another one.", rich_help_panel="What to load", show_default=False),
]
FailOption = Annotated[
    opt.FailChoice,
    typer.Option(
        help="Exit with 1 from this severity on: error (other function), warning (other rounding), note (other form).",
        rich_help_panel="What to show",
    ),
]


def diff(
    a: First,
    b: Second,
    revision: opt.Revision = None,
    revision_b: RevisionB = None,
    config_only: opt.ConfigOnly = False,
    meta: opt.Meta = False,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = None,
    dtype_b: DtypeB = None,
    allow_pickle: opt.AllowPickle = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    text: opt.TextOption = None,
    text_file: opt.TextFile = None,
    tokens: opt.Tokens = None,
    batch: opt.Batch = 1,
    seed: opt.Seed = 0,
    level: opt.LevelOption = opt.LevelChoice.FORWARD,
    format: opt.FormatOption = None,
    out: opt.Out = None,
    fail_on: FailOption = opt.FailChoice.WARNING,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Tell in what model B is not as model A: its norms, placement, attention, weights, and where the signals part.

    Exit code 0: the same, up to --fail-on. 1: they differ. 2: they could not be compared.
    """
    asked = dict(locals())
    with outcome(debug=debug):
        raise typer.Exit(_answered(asked))


def _answered(asked: dict[str, Any]) -> int:
    """The exit code, after the comparison was written."""
    out, form = asked["out"], pick(asked["format"], asked["out"])
    if out is not None:
        check_place(out)
    report = _compared(asked)
    _deliver(report, form, out, quiet=asked["quiet"])
    return _code(report)


def _compared(asked: dict[str, Any]) -> DiffReport:
    """Loads both targets and compares them; standard output stays untouched meanwhile."""
    for name in ("a", "b"):
        if not asked[name].strip():
            raise SettingError(f"no target {name.upper()} is named", expected="A B", hint="normprobe diff --help")
    with progress(quiet=asked["quiet"]) as advance, quiet_stdout():
        if advance is not None:
            advance("load", 0, 0)
        with at_once():
            from normprobe.diffing.run import diff as compare
            from normprobe.targets import resolve

        of_a, of_b = _options(asked)
        a, b = resolve(asked["a"], of_a), resolve(asked["b"], of_b)
        if asked["level"] is opt.LevelChoice.FORWARD and not (of_a.config_only or of_a.meta):
            _refuse_drawn(a, b)
        values, notes = _inputs(a, b)
        report = compare(a.model, b.model, values, level=asked["level"].value, seed=asked["seed"], progress=advance)
    return _described(report, a, b, notes, asked["fail_on"])


def _refuse_drawn(a: Loaded, b: Loaded) -> None:
    """Refuses to hold the values of a checkpoint against weights that were drawn, as there is only a configuration.

    Raises:
        SettingError: as above.
    """
    drawn = {name: one for name, one in (("A", a), ("B", b)) if one.target.source == _CONFIGURATION}
    stored = [one for one in (a, b) if one.target.source in _STORED]
    for name, one in drawn.items() if stored else ():
        raise SettingError(
            f"{name} has no weights to compare: {one.target.name} is a configuration alone",
            expected="weights in both, or in none",
            found=f"those of a {stored[0].target.source} in the other",
            hint="--config-only draws both under one seed; --level structure compares the build alone",
        )


def _options(asked: dict[str, Any]) -> tuple[TargetOptions, TargetOptions]:
    from dataclasses import replace

    from normprobe.targets import TargetOptions

    names = ("config_only", "meta", "device", "allow_pickle", "trust_remote_code", "text", "tokens", "batch", "seed")
    first = TargetOptions(
        **{name: asked[name] for name in names},
        revision=asked["revision"],
        dtype=asked["dtype"].value if asked["dtype"] else None,
        text_file=str(asked["text_file"]) if asked["text_file"] else None,
    )
    second = replace(first, revision=asked["revision_b"] or first.revision)
    return first, replace(second, dtype=asked["dtype_b"].value if asked["dtype_b"] else second.dtype)


def _inputs(a: Loaded, b: Loaded) -> tuple[Any, tuple[str, ...]]:
    """The inputs of A for both, those of B where A has none, and what is to be said of them."""
    from normprobe.diffing.inputs import refuse_unlike, within_vocabularies

    values = a.inputs if a.inputs is not None else b.inputs
    if values is None:
        raise InputError(
            "no inputs for either model",
            expected="a target that says what it takes",
            found="; ".join((*a.notes, *b.notes)),
            hint="give factories that return (model, inputs)",
        )
    refuse_unlike(a.inputs, b.inputs)
    notes = () if _tokens_alike(a, b) else ("the tokenizers of A and B give other tokens for this text",)
    within, said = within_vocabularies(values, a.model, b.model)
    return within, (*notes, *said)


def _tokens_alike(a: Loaded, b: Loaded) -> bool:
    """False where both targets have a tokenizer, and these gave other ids."""
    import torch

    if a.tokenizer is None or b.tokenizer is None or not isinstance(a.inputs, dict) or not isinstance(b.inputs, dict):
        return True
    one, other = a.inputs.get("input_ids"), b.inputs.get("input_ids")
    return one is None or other is None or (one.shape == other.shape and torch.equal(one.cpu(), other.cpu()))


def _described(report: DiffReport, a: Loaded, b: Loaded, notes: tuple[str, ...], fail_on: opt.FailChoice) -> DiffReport:
    """The report with what the loaders know of the targets, what they had to say, and what fails it."""
    from normprobe.report.diffs.report import DiffReport

    data = report.data
    targets = {
        side: getattr(data, side).model_copy(update=one.target.model_dump(exclude_defaults=True, by_alias=False))
        for side, one in (("a", a), ("b", b))
    }
    said = [f"{side}: {note}" for side, one in (("A", a), ("B", b)) for note in one.notes]
    skipped = (*a.skipped, *b.skipped, *data.skipped)
    words = (a.target if a.inputs is not None else b.target).inputs or data.inputs
    said = [note for note in said if not (words and note.endswith(words))]
    update = {**targets, "notes": (*notes, *said, *data.notes), "skipped": skipped, "inputs": words}
    update["fail_on"] = fail_on.value
    return DiffReport(data.model_copy(update=update))


def _deliver(report: DiffReport, format: Format, out: Path | None, *, quiet: bool) -> None:
    from normprobe.report.diffs.content import verdict_text
    from normprobe.report.diffs.terminal import TerminalDiff

    if out is not None:
        write_whole(out, report.content(format))
        if not quiet:
            stderr().print(f"wrote {out}: {verdict_text(report.data)}", markup=False)
    elif format is Format.RICH:
        show(TerminalDiff(report.data))
    else:
        put(report.content(format))


def _code(report: DiffReport) -> int:
    """1 where they differ; 2 where too little was compared to tell, which is no success, whatever milder was found."""
    if report.failed():
        return FINDINGS
    return CLEAN if report.complete or report.data.fail_on == "never" else FAILED
