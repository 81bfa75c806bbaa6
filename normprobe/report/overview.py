"""What the report says about the build of the model, in short facts that every renderer shares."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normprobe.records import Anatomy, Branch, Head, NormSite, ReportData, Stream
from normprobe.report.facts import attention_facts, norm_kinds
from normprobe.report.streams import (
    factor_text,
    final_norm_text,
    inner_norms,
    path_facts,
    placement_text,
    reader_facts,
    scale_facts,
    size_text,
    width_text,
)
from normprobe.report.wording import BRANCHES, amount, listing, number, place, plural

_UNTRAINED = re.compile(r"random weights\b|\d+ of \d+ tensors? not in the checkpoint\b")


def headline(data: ReportData) -> list[str]:
    """The target: weights that are no checkpoint's, class, parameters, dtype, device, inputs, revision, where known."""
    target = data.target
    facts = (
        *weights_facts(data),
        target.class_name,
        f"{amount(target.parameters)} parameter{'' if target.parameters == 1 else 's'}" if target.parameters else "",
        target.dtype,
        f"autocast {target.autocast}" if target.autocast else "",
        target.device,
        target.inputs,
        f"revision {target.revision}" if target.revision else "",
        "structure only" if data.level == "structure" else "",
    )
    return [fact for fact in facts if fact]


def weights_facts(data: ReportData) -> list[str]:
    """What makes the weights other than those of a checkpoint: all random, or some tensors not in it.

    The loader says it in a note that begins so; the reason and the names after a colon stay in the note.
    """
    return [note.partition(":")[0] for note in data.notes if _UNTRAINED.match(note)]


def gaps(data: ReportData) -> list[str]:
    """How much was not looked at, and how many checks the settings left out; empty where all was."""
    unseen = sum(not one.unasked for one in data.skipped)
    skipped = f"{unseen} not looked at" if unseen else ""
    off = sum(one.findings is None for one in data.ignored)
    silenced = sum(one.findings or 0 for one in data.ignored)
    facts = (
        skipped,
        f"{plural(off, 'check')} left out" if off else "",
        f"{plural(silenced, 'finding')} left out" if silenced else "",
        f"settings of {data.settings.source}" if data.settings.source else "",
    )
    return [fact for fact in facts if fact]


def broken_output(data: ReportData) -> str:
    """That the output was not finite and where that began; empty where it was finite or not looked at."""
    if data.measurements.output_finite is not False:
        return ""
    first = data.measurements.first_non_finite
    return "the output is not finite" + (f"; first at {place(first)}" if first else "; where it began is not known")


def stream_lines(anatomy: Anatomy, stream: Stream) -> list[list[str]]:
    """One residual stream: lines for its build, its norms, its attention and its scales; none is empty."""
    kinds = listing(BRANCHES.get(branch.kind, branch.kind) for branch in stream.branches)
    norms = _named(anatomy, _norm_paths(stream))
    sites = [site for site in anatomy.attention if owner(anatomy, site.path) is stream]
    entry = [f"entry norm {stream.entry_norm}"] if stream.entry_norm else []
    build = [f"{size_text(stream)} ({kinds})" if kinds else size_text(stream), width_text(stream)]
    lines = (
        [placement_text(anatomy, stream), *build, *path_facts(stream)],
        [*norm_kinds(norms), *_inner(anatomy, stream), *entry, final_norm_text(stream), *reader_facts(stream)],
        *([layout] for layout in attention_facts(sites)),
        scale_facts(stream),
    )
    return [line for line in lines if line]


def stream_facts(anatomy: Anatomy, stream: Stream) -> list[str]:
    """All facts of `stream_lines` in a row."""
    return [fact for line in stream_lines(anatomy, stream) for fact in line]


def leftover_facts(anatomy: Anatomy) -> list[str]:
    """What lies off every stream: other norms by role, attention of no stream, computed weights, the head."""
    on_streams = {path for stream in anatomy.streams for path in _norm_paths(stream)}
    inside = {norm.path for stream in anatomy.streams for norm in _inner_norms(anatomy, stream)}
    other = [norm for norm in anatomy.norms if norm.path not in on_streams | inside]
    sites = [site for site in anatomy.attention if owner(anatomy, site.path) is None]
    off = " off the streams" if anatomy.streams else ""
    roles = listing(norm.role for norm in other)
    return [
        *([f"{plural(len(other), 'norm')}{off} ({roles})"] if other else []),
        *(norm_kinds(other) if not anatomy.streams else []),
        *(fact + (" (off the streams)" if off else "") for fact in attention_facts(sites)),
        *([f"computed weights: {listing(_computed(anatomy))}"] if anatomy.reparametrizations else []),
        *_head(anatomy.head),
    ]


def _head(head: Head | None) -> list[str]:
    if head is None:
        return []
    return [
        f"head {head.path}" + (f", tied to {head.tied_to}" if head.tied_to else ""),
        *([f"logits × {factor_text(head.logit_multiplier)}"] if head.logit_multiplier != 1.0 else []),
        *([f"logits soft-capped at {number(head.softcap)}"] if head.softcap is not None else []),
    ]


def owner(anatomy: Anatomy, path: str) -> Stream | None:
    """The stream that has a block around the module at `path`, the closest block where several have."""
    around = [
        (len(branch.block.strip(".")), position)
        for position, stream in enumerate(anatomy.streams)
        for branch in stream.branches
        if _inside(path, branch)
    ]
    return anatomy.streams[max(around)[1]] if around else None


def _inside(path: str, branch: Branch) -> bool:
    if branch.block == ".":  # everything is inside the whole model; what the branch uses belongs to it
        return path == "." or any(name.startswith(f"{path}.") for name in branch.parameters)
    return path == branch.block or path.startswith(f"{branch.block}.")


def _norm_paths(stream: Stream) -> list[str]:
    paths = [
        path for branch in stream.branches for path in (branch.pre_norm, branch.output_norm, branch.post_norm) if path
    ]
    ends = [path for path in (stream.entry_norm, stream.final_norm) if path]
    return list(dict.fromkeys([*paths, *ends]))


def _inner_norms(anatomy: Anatomy, stream: Stream) -> list[NormSite]:
    inner = (norm for branch in stream.branches for norm in inner_norms(anatomy, branch))
    return list({norm.path: norm for norm in inner}.values())


def _inner(anatomy: Anatomy, stream: Stream) -> list[str]:
    """The norms between the weights of its branches: `2 inner norms (LayerNorm eps 1e-06)`."""
    inner = _inner_norms(anatomy, stream)
    return [f"{plural(len(inner), 'inner norm')} ({', '.join(norm_kinds(inner))})"] if inner else []


def _named(anatomy: Anatomy, paths: Sequence[str]) -> list[NormSite]:
    sites = {norm.path: norm for norm in anatomy.norms}
    return [sites[path] for path in paths if path in sites]


def _computed(anatomy: Anatomy) -> list[str]:
    return [item.kind.replace("_", " ") for item in anatomy.reparametrizations]
