"""`normprobe patch CHECKPOINT OUT`: rewrite a checkpoint into a new folder, or check one that was written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from normprobe.checkpoints.names import shown
from normprobe.cli import options as opt
from normprobe.cli import patch_options as own
from normprobe.cli.interrupt import at_once
from normprobe.cli.order import order_of
from normprobe.cli.outcome import CLEAN, FINDINGS, outcome
from normprobe.cli.output import put, quiet_stdout, show
from normprobe.cli.progress import byte_progress
from normprobe.cli.signature import takes
from normprobe.errors import SettingError
from normprobe.report.lines import Lines
from normprobe.report.verdict import verdict

if TYPE_CHECKING:
    from normprobe.patching.options import PatchOptions
    from normprobe.patching.planned import Planned
    from normprobe.patching.run import Patched
    from normprobe.report.report import Report
    from normprobe.rewrites import Rewrite

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_CALLED = {"out": "OUT", "as_type": "--as"}
_REWRITES = (
    "upcast_norms",
    "eps",
    "swap",
    "fold_norms",
    "final_norm",
    "output_norms",
    "qk_norm",
    "qk_clip",
    "residual",
    "init",
    "seed",
    "only",
    "rewrite",
)


@takes(own.PatchRequest)
def patch(request: own.PatchRequest) -> None:
    """Rewrite a checkpoint into a new folder, whole or not at all; CHECKPOINT itself stays as it is.

    Rewrites are applied in the order in which their options are given.

    Exit code 0: done; with --verify: as it was written. 1: with --verify: not as it was written, the manifest included.
    2: it could not be done, and nothing is left of OUT; with --verify: no manifest, or one of another version.
    """
    asked = {name: getattr(request, name) for name in request.__dataclass_fields__ if name != "context"}
    asked["order"] = order_of(request.context)
    with outcome(debug=request.debug):
        _check_named(asked, "checkpoint", "a folder, a hub id or a .gguf file")
        run = _verified if request.verify else _planned if request.plan else _patched
        raise typer.Exit(run(asked))


def _verified(asked: dict[str, Any]) -> int:
    named = ("checkpoint", "verify", "format", "debug", "quiet", "order")
    _refuse(asked, "--verify checks a folder alone", tuple(name for name in asked if name not in named))
    from normprobe.patching.verify import verify

    with byte_progress(quiet=asked["quiet"]) as advance:
        found = verify(Path(asked["checkpoint"]), advance)
    if asked["format"] is opt.TableChoice.JSON:
        put(
            json.dumps({"folder": asked["checkpoint"], "problems": found.problems, "told": found.told}, indent=2) + "\n"
        )
    else:
        show(Lines(map(Text, (*found.told, *found.problems, found.summary))))
    return FINDINGS if found.problems else CLEAN


def _planned(asked: dict[str, Any]) -> int:
    _refuse(asked, "--plan writes nothing", ("out", "overwrite", "max_shard_size"))
    with byte_progress(quiet=asked["quiet"]) as advance, quiet_stdout():
        advance("load", 0, 0)
        with at_once():
            from normprobe.patching.planned import planned
        found = planned(asked["checkpoint"], _rewrites(asked), _options(asked), advance)
    if asked["format"] is opt.TableChoice.JSON:
        put(json.dumps(_foretold(found), indent=2, ensure_ascii=False) + "\n")
    else:
        rows = (row for plan in found.plans for row in plan.rows(brief=True, planned=True))
        became = () if found.became is None else (str(found.became),)
        show(Lines((*_noted(found.notes), *map(Text, (*rows, *became)))))
    if found.problem is not None:
        raise found.problem
    return CLEAN


def _foretold(found: Planned) -> dict[str, Any]:
    """What a patch would do as plain values."""
    from normprobe.rewrites.rows import values_of

    return {
        "steps": [values_of(*step) for plan in found.plans for step in plan.steps],
        "became": None if found.became is None else json.loads(found.became.model_dump_json()),
        "inputs": found.inputs,
        "notes": found.notes,
        "problem": None if found.problem is None else str(found.problem),
    }


def _patched(asked: dict[str, Any]) -> int:
    if asked["out"] is None:
        raise SettingError("no folder to write to", expected="CHECKPOINT OUT", hint="--plan needs none")
    _check_named(asked, "out", "a new folder")
    with byte_progress(quiet=asked["quiet"]) as advance, quiet_stdout():
        advance("load", 0, 0)
        with at_once():
            from normprobe.patching.run import patch as run
        found = run(asked["checkpoint"], Path(asked["out"]), _rewrites(asked), _options(asked), advance)
    if asked["format"] is opt.TableChoice.JSON:
        told = {**json.loads(found.manifest.model_dump_json()), "notes": found.notes}
        put(json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    else:
        show(Lines(_parts(found)))
    return CLEAN


def _rewrites(asked: dict[str, Any]) -> tuple[Rewrite, ...]:
    from normprobe.patching.asked import Asked
    from normprobe.patching.recipe import read_recipe

    given = {name: asked[name] for name in _REWRITES if asked[name] is not None}
    further = () if asked["recipe"] is None else read_recipe(asked["recipe"])
    found = Asked(**given, further=further, order=asked["order"]).rewrites()
    if not found and asked["mend"] is None and asked["as_type"] is None:
        hint = "--qk-norm calibrated, --fold-norms, --recipe patch.toml, …; normprobe patch --help"
        raise SettingError("nothing to do: no rewrite is named", hint=hint)
    return found


def _options(asked: dict[str, Any]) -> PatchOptions:
    from normprobe.patching.options import PatchOptions
    from normprobe.targets import TargetOptions

    names = ("revision", "allow_pickle", "trust_remote_code", "text", "tokens", "batch")
    file = None if asked["text_file"] is None else str(asked["text_file"])
    return PatchOptions(
        overwrite=asked["overwrite"],
        max_shard_bytes=None if asked["max_shard_size"] is None else _size(asked["max_shard_size"]),
        level=None if asked["no_audit"] else "forward",
        mend=asked["mend"],
        as_type=asked["as_type"],
        target=TargetOptions(**{name: asked[name] for name in names}, text_file=file),
    )


def _size(text: str) -> int:
    """Bytes of `2GB`, `500 MiB` or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else "?"
    size = int(float(found[1]) * _UNITS[unit]) if found and unit in _UNITS else 0
    if size < 1:
        raise SettingError("--max-shard-size is no size", expected="a number with KB, MB, GB, MiB or GiB", found=text)
    return size


def _check_named(asked: dict[str, Any], name: str, expected: str) -> None:
    if not asked[name].strip():
        raise SettingError(f"{name.upper()} is empty", expected=expected, found=repr(asked[name]))


def _refuse(asked: dict[str, Any], why: str, names: tuple[str, ...]) -> None:
    for name in names:
        if asked[name] not in (getattr(own.PatchRequest, name), []):
            option = _CALLED.get(name, "--" + name.replace("_", "-"))
            raise SettingError(f"{option} has no effect: {why}", hint=f"leave {option} out")


def _parts(found: Patched) -> Iterator[Text]:
    yield from _noted(found.notes)
    if found.before is not None:
        yield from _audited("before", found.before)
    yield from (Text(row) for each in found.plans for row in each.rows(brief=True))
    if len(found.plans) > 1 and found.manifest.proof is not None:
        yield Text(f"all together: {found.manifest.proof}")
    if found.manifest.became is not None:
        yield Text(str(found.manifest.became))
    if found.after is not None:
        yield from _audited("after", found.after)
    if found.manifest.left_out:
        yield Text(
            f"left behind, since they hold weights as they were: {', '.join(map(shown, found.manifest.left_out))}"
        )
    yield Text(f"wrote {found.out}: {found.size}", style="bold")
    yield Text(f"  load it with {found.loading}")


def _noted(notes: Sequence[str]) -> Iterator[Text]:
    return (Text(note, style="dim") for note in notes)


def _audited(when: str, report: Report) -> Iterator[Text]:
    yield Text(f"{when}: {verdict(report.data).text}", style="bold")
    for finding in report.findings:
        yield Text(f"  {finding.code} {finding.name} at {finding.where}: {finding.message}")
