"""`normprobe sweep TARGET`: the same model at several widths or depths, after a few optimiser steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from normprobe.checks import refuse_none
from normprobe.cli import options as opt
from normprobe.cli.interrupt import at_once
from normprobe.cli.outcome import CLEAN, FINDINGS, outcome
from normprobe.cli.output import put, quiet_stdout, show
from normprobe.cli.progress import Advance, progress
from normprobe.cli.request import known_settings
from normprobe.errors import SettingError
from normprobe.records import ReportData, Settings
from normprobe.report.terminal import TerminalFindings
from normprobe.report.wording import number

if TYPE_CHECKING:
    from normprobe.records.sweep import Axis, LearningRates, Sweep, SweepReport

_OPTIMIZERS = {"adam": "Adam", "sgd": "SGD"}
_TITLES = {"standard": "standard parametrisation", "mup": "muP (normprobe's parameter groups)"}
_STYLES = {
    "growing": "bold red",
    "vanishing": "bold yellow",
    "shrinking": "yellow",
    "constant": "green",
    "unknown": "dim",
}
_WORDS = {"constant": "Θ(1)"}
_EXPECTED = (
    "expected under muP: Θ(1) everywhere, but the readout and the model's output may be shrinking, as they start at "
    "width^-1/2 (Yang et al. 2022, table 3)"
)
_LR = 1e-3  # where none is given
_A_DECADE = 2  # learning rates in each decade of a range


def sweep(
    target: opt.SizedTarget,
    widths: Annotated[Optional[str], typer.Option(help="Widths, with commas between them.")] = None,  # noqa: UP045
    depths: Annotated[Optional[str], typer.Option(help="Depths instead.")] = None,  # noqa: UP045
    lr: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Learning rate, or a range 1e-4:1e-1 whose best one is found at each size."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 4,
    optimizer: opt.SweepOptimizer = opt.OptimizerChoice.ADAM,
    seed: opt.Seed = 0,
    trust_remote_code: opt.TrustRemoteCode = False,
    format: opt.TableOption = opt.TableChoice.RICH,
    fail_on: opt.FailOption = None,
    config: opt.Config = None,
    isolated: opt.Isolated = False,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train a model at several widths for a few steps, and say which outputs grow or vanish with the width.

    TARGET is a configuration (folder, config.json, hub id, or model type), or a factory that takes the size.
    Weights are random. Exit code 0: no finding at or above --fail-on. 1: one or more. 2: it could not run.
    """
    with outcome(debug=debug):
        settings = known_settings(config, fail_on, isolated=isolated)
        refuse_none(settings, sweep=True)
        axis: Axis = "depth" if depths else "width"
        sizes, rates = _sizes(widths, depths), _rates(lr)
        with progress(quiet=quiet) as advance, quiet_stdout():
            found = _swept(target, axis, sizes, rates, steps, optimizer, seed, trust_remote_code, settings, advance)
        _deliver(found, format)
        failed = any(finding.fails(settings.fail_on) for finding in found.findings)
        raise typer.Exit(FINDINGS if failed else CLEAN)


def _deliver(found: SweepReport, format: opt.TableChoice) -> None:
    if format is opt.TableChoice.JSON:
        put(json.dumps(found.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
    else:
        show(Group(*_parts(found)))


def _swept(
    target: str,
    axis: Axis,
    sizes: list[int],
    rates: list[float],
    steps: int,
    optimizer: opt.OptimizerChoice,
    seed: int,
    trust_remote_code: bool,
    settings: Settings,
    advance: Advance | None,
) -> SweepReport:
    """The sweep; of several rates the one in the middle serves the coordinate check."""
    with at_once():
        from normprobe.sweeping.check import coordinate_check
    factory, notes = _factory(target, axis, seed, trust_remote_code)
    found = coordinate_check(
        factory,
        sizes,
        axis=axis,
        steps=steps,
        optimizer=optimizer.value,
        lr=rates[len(rates) // 2],
        lrs=rates if len(rates) > 1 else (),
        seed=seed,
        settings=settings,
        progress=advance,
    )
    return found.model_copy(update={"notes": (*notes, *found.notes)})


def _sizes(widths: str | None, depths: str | None) -> list[int]:
    if (widths is None) == (depths is None):
        raise SettingError("a sweep needs sizes", expected="--widths or --depths", found="neither or both")
    text = widths or depths or ""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError("the sizes are no numbers", expected="such as 128,256,512", found=text) from None


def _rates(text: str | None) -> list[float]:
    """One rate, or those of a range, evenly spaced by their logarithm."""
    if text is None:
        return [_LR]
    try:
        ends = [float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or not all(0 < end < math.inf for end in ends):
        raise SettingError("--lr is no rate", expected="a number above 0, or a range such as 1e-4:1e-1", found=text)
    if len(ends) == 1:
        return ends
    low, high = sorted(math.log10(end) for end in ends)
    count = max(1, round((high - low) * _A_DECADE))
    return [10 ** (low + (high - low) * step / count) for step in range(count + 1)]


def _factory(target: str, axis: Axis, seed: int, trust_remote_code: bool) -> tuple[Any, tuple[str, ...]]:
    """What builds the model at a size, and what is to be said of it."""
    from normprobe.sweeping.fields import sizing
    from normprobe.targets import TargetOptions, resolve
    from normprobe.targets.factory import sized_factory
    from normprobe.targets.quiet import quiet

    factory = sized_factory(target)
    if factory is not None:
        return factory, ()
    options = TargetOptions(config_only=True, meta=True, seed=seed, trust_remote_code=trust_remote_code)
    with quiet():
        found = sizing(resolve(target, options).model, axis)
    return found, (found.described(axis),)


def _parts(found: SweepReport) -> Iterator[RenderableType]:
    sizes = ", ".join(map(str, found.sizes))
    steps = f"{found.steps} steps of {_OPTIMIZERS[found.optimizer]}, learning rate {number(found.lr)}"
    yield Text(f"{found.axis}s {sizes}; {steps}; loss: {found.loss}")
    for one in found.sweeps:
        yield Text("\n" + _TITLES[one.parametrisation], style="bold")
        yield _modules(one, found.axis)
        if one.rates is not None:
            yield _losses(one.rates, found.sizes)
    yield Text(
        f"\nΘ(1): both slopes within ±{number(found.slope_limit)}, a choice (halfway to 1/2, the smallest "
        "exponent that theory knows); shrinking: the output alone is below",
        style="dim",
    )
    if any(one.parametrisation == "mup" for one in found.sweeps):
        yield Text(_EXPECTED, style="dim")
    for note in found.notes:
        yield Text(note, style="dim")
    said = {"findings": found.findings, "ignored": found.ignored, "skipped": found.skipped}
    yield TerminalFindings(ReportData.model_validate(said))


def _modules(one: Sweep, axis: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("module")
    for title in ("output", "update"):
        table.add_column(f"{title} ~ {axis}^", justify="right", no_wrap=True)
    table.add_column("")
    for row in one.modules:
        slopes = ("-" if math.isnan(value) else f"{value:+.2f}" for value in (row.activation_slope, row.update_slope))
        table.add_row(row.path, *slopes, Text(_WORDS.get(row.verdict, row.verdict), style=_STYLES[row.verdict]))
    return table


def _losses(rates: LearningRates, sizes: tuple[int, ...]) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="dim", expand=False, title="loss by learning rate", title_justify="left"
    )
    table.add_column("size", justify="right")
    for rate in rates.rates:
        table.add_column(number(rate), justify="right", no_wrap=True)
    table.add_column("best rate", justify="right", no_wrap=True)
    for size, losses, best in zip(sizes, rates.losses, rates.best, strict=True):
        cells = (
            Text(number(loss), style="bold green" if rate == best else "")
            for rate, loss in zip(rates.rates, losses, strict=True)
        )
        table.add_row(str(size), *cells, "none" if math.isnan(best) else number(best))
    return table
