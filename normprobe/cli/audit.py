"""`normprobe audit TARGET` and `normprobe demo`: load, probe, print, exit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from normprobe.cli import options as opt
from normprobe.cli.outcome import CLEAN, FINDINGS, outcome, stderr
from normprobe.cli.output import deliver, pick, quiet_stdout
from normprobe.cli.progress import progress
from normprobe.errors import SettingError
from normprobe.records import Level
from normprobe.report.files import check_place
from normprobe.report.render import Format
from normprobe.report.report import Report
from normprobe.report.wording import tally

if TYPE_CHECKING:
    from normprobe.targets import Loaded, TargetOptions

DEMO = "normprobe.demo.model:build"


def audit(
    target: opt.Target,
    revision: opt.Revision = None,
    config_only: opt.ConfigOnly = False,
    meta: opt.Meta = False,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = None,
    allow_pickle: opt.AllowPickle = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    text: opt.TextOption = None,
    text_file: opt.TextFile = None,
    tokens: opt.Tokens = None,
    batch: opt.Batch = 1,
    seed: opt.Seed = 0,
    level: opt.LevelOption = opt.LevelChoice.FORWARD,
    backward: opt.Backward = False,
    autocast: opt.Autocast = None,
    format: opt.FormatOption = None,
    out: opt.Out = None,
    fail_on: opt.FailOption = opt.FailChoice.ERROR,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Find the norms of a model, measure what its signal does, and say what is wrong.

    Exit code 0: clean. 1: a finding at or above --fail-on. 2: the audit could not run.
    """
    with outcome(debug=debug):
        depth = _level(level, backward=backward)
        if out is not None:
            check_place(out)
        from normprobe.targets import TargetOptions

        wanted = TargetOptions(
            revision=revision,
            config_only=config_only,
            meta=meta,
            device=device,
            dtype=dtype.value if dtype else None,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            text=text,
            text_file=str(text_file) if text_file else None,
            tokens=tokens,
            batch=batch,
            seed=seed,
        )
        report = examine(
            target, wanted, level=depth, autocast=autocast.value if autocast else None, quiet=quiet
        )
        deliver(report, pick(format, out), out)
        if out is not None and not quiet:
            stderr().print(f"wrote {out}: {tally(one.severity for one in report.findings)}", markup=False)
        raise typer.Exit(FINDINGS if report.failed(fail_on.value) else CLEAN)


def demo(
    format: opt.FormatOption = None,
    out: opt.Out = None,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Audit a small language model that comes with normprobe and has a fault.

    Exit code 0 although there is a finding, so that it serves as a first check of an installation.
    """
    with outcome(debug=debug):
        if out is not None:
            check_place(out)
        from normprobe.targets import TargetOptions

        report = examine(DEMO, TargetOptions(), level="forward", autocast=None, quiet=quiet)
        chosen = pick(format, out)
        deliver(report, chosen, out)
        if not quiet and (chosen is Format.RICH or out is not None):
            verdict = tally(one.severity for one in report.findings)
            stderr().print(
                f"demo: {verdict}; exit code 0 all the same. `normprobe audit {DEMO}` exits with "
                f"{FINDINGS if report.failed('error') else CLEAN}.",
                markup=False,
            )


def examine(target: str, wanted: TargetOptions, *, level: Level, autocast: str | None, quiet: bool) -> Report:
    """Loads the target and probes it; standard output stays untouched meanwhile.

    Args:
        target: its name.
        wanted: how to load it.
        level: how far to go.
        autocast: dtype of automatic mixed precision, or None.
        quiet: show no progress.

    Raises:
        NormprobeError: the target could not be loaded, run or read.
    """
    with progress(quiet=quiet) as advance, quiet_stdout():
        if advance is not None:
            advance("load", 0, 0)
        from normprobe.targets import resolve

        loaded = resolve(target, wanted)
        from normprobe.probing import probe

        report = probe(
            loaded.model,
            loaded.inputs,
            level=level,
            tokenizer=loaded.tokenizer,
            autocast=autocast,
            seed=wanted.seed,
            progress=advance,
        )
    return _described(report, loaded)


def _described(report: Report, loaded: Loaded) -> Report:
    """The report with what the loader knows of the target, and the loader's notes before the others."""
    known = loaded.target.model_dump(exclude_defaults=True)
    target = report.target.model_copy(update=known)
    notes = tuple(dict.fromkeys((*loaded.notes, *report.notes)))
    return Report(report.data.model_copy(update={"target": target, "notes": notes}))


def _level(level: opt.LevelChoice, *, backward: bool) -> Level:
    if not backward:
        return level.value
    if level is opt.LevelChoice.STRUCTURE:
        raise SettingError(
            "--backward and --level structure exclude each other", hint="leave one of them out"
        )
    return "backward"
