"""`normprobe audit TARGET` and `normprobe demo`: load, probe, print, exit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from normprobe.cli import options as opt
from normprobe.cli.interrupt import at_once
from normprobe.cli.outcome import CLEAN, FAILED, FINDINGS, outcome, stderr
from normprobe.cli.output import deliver, pick, quiet_stdout
from normprobe.cli.progress import progress
from normprobe.cli.request import Request
from normprobe.cli.signature import takes
from normprobe.errors import SettingError
from normprobe.report.baseline import against, extended, read_baseline, standing
from normprobe.report.files import check_place
from normprobe.report.formats import Format
from normprobe.report.report import Report
from normprobe.report.verdict import verdict

if TYPE_CHECKING:
    from normprobe.targets import Loaded

DEMO = "normprobe.demo.model:build"


@takes(Request)
def audit(request: Request) -> None:
    """Find the norms of a model, measure what its signal does, and say what is wrong.

    Exit code 0: no finding at or above --fail-on. 1: one or more. 2: the audit could not run, or nothing of the
    model could be read.
    """
    with outcome(debug=request.debug):
        raise typer.Exit(_audited(request))


def demo(
    format: opt.FormatOption = None,
    out: opt.Out = None,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Audit a small language model that comes with normprobe and has a fault.

    Exit code 0 although there is a finding, so that it serves as a first check of an installation.
    """
    request = Request(DEMO, isolated=True, format=format, out=out, quiet=quiet)
    with outcome(debug=debug):
        report = _answered(request)
        if not quiet and (out is not None or pick(format, out) is Format.RICH):
            code, said = FINDINGS if report.failed("error") else CLEAN, verdict(report.data).text
            stderr().print(
                f"demo: {said}; exit code 0 all the same. `normprobe audit {DEMO}` exits with {code}.",
                markup=False,
            )


def examine(request: Request) -> Report:
    """Loads the target and probes it; standard output stays untouched meanwhile.

    Args:
        request: what to load, and how far to go.

    Raises:
        NormprobeError: the target could not be loaded, run or read.
    """
    if not request.target.strip():
        raise SettingError(
            "no target is named", expected="TARGET", found=repr(request.target), hint="normprobe audit --help"
        )
    level, settings = request.depth(), request.settings()
    with progress(quiet=request.quiet) as advance, quiet_stdout():
        if advance is not None:
            advance("load", 0, 0)
        with at_once():
            from normprobe.probing import probe
            from normprobe.targets import load_optimizer, resolve

        loaded = resolve(request.target, request.loading())
        report = probe(
            loaded.model,
            loaded.inputs,
            level=level,
            measures=request.extras(),
            lr=request.lr,
            optimizer=load_optimizer(request.optimizer, loaded.model) if request.optimizer else None,
            tokenizer=loaded.tokenizer,
            exact=request.exact,
            autocast=request.autocast.value if request.autocast else None,
            seed=request.seed,
            settings=settings,
            progress=advance,
        )
    return _described(report, loaded)


def _audited(request: Request) -> int:
    """The exit code, after the report was written."""
    report = _answered(request)
    if request.out is not None and not request.quiet:
        stderr().print(f"wrote {request.out}: {verdict(report.data).text}", markup=False)
    if report.failed():
        return FINDINGS
    blind = verdict(report.data).blind and report.data.settings.fail_on != "never"
    return FAILED if blind else CLEAN


def _answered(request: Request) -> Report:
    """The report, after it was written to where the request wants it."""
    format = pick(request.format, request.out)
    _check_files(request)
    known = read_baseline(request.baseline) if request.baseline is not None else None
    before = standing(request.write_baseline) if request.write_baseline is not None else None
    report = examine(request)
    if request.write_baseline is not None and before is not None:
        known = known or extended(report.data, before)
        report.save_baseline(request.write_baseline)
    if known is not None:
        report = Report(against(report.data, known))
    deliver(report, format, request.out)
    return report


def _check_files(request: Request) -> None:
    """Refuses files that could not be written, and a report in the place of a baseline.

    Raises:
        NormprobeError: as above.
    """
    for file in filter(None, (request.out, request.write_baseline)):
        check_place(file)
    for option, known in (("--baseline", request.baseline), ("--write-baseline", request.write_baseline)):
        if known is not None and request.out is not None and request.out.resolve() == known.resolve():
            expected = "two files: the report would stand in the place of the baseline"
            raise SettingError(f"--out and {option} name one file", expected=expected, found=str(known))


def _described(report: Report, loaded: Loaded) -> Report:
    """The report with what the loader knows of the target, and the loader's notes before the others."""
    known = loaded.target.model_dump(exclude_defaults=True, by_alias=False)
    target = report.target.model_copy(update=known)
    notes = tuple(dict.fromkeys((*loaded.notes, *report.notes)))
    skipped = (*loaded.skipped, *report.skipped)
    return Report(report.data.model_copy(update={"target": target, "notes": notes, "skipped": skipped}))
