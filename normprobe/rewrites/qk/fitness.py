"""Whether norms can be put on the queries and keys of an attention site, and behind which modules."""

from __future__ import annotations

from normprobe.records import AttentionSite, HeadRows
from normprobe.rewrites.base import Survey, module_at
from normprobe.rewrites.qk.between import why_bent
from normprobe.rewrites.swap import why_not as class_stays


def projection(columns: HeadRows) -> str:
    """The module that holds the weight of these rows."""
    return columns.parameter.rpartition(".")[0] or "."


def why_not(survey: Survey, site: AttentionSite) -> str | None:
    """Why this site cannot have norms on queries and keys; None where it can."""
    if site.qk_norm is not None:
        return "its queries and keys are normed already"
    query, key = site.columns.get("q"), site.columns.get("k")
    if query is None or key is None:
        return "which rows of which weights make its queries and keys could not be told"
    sizes = {sum(stop - start for start, stop in spans) for columns in (query, key) for spans in columns.heads}
    if sizes != {site.head_dim}:
        return f"its heads of {site.head_dim} features are put together from several projections"
    readers = [s.path for s in survey.anatomy.attention if s is not site and {*_weights(s)} & {*_weights(site)}]
    if readers:
        return f"its queries or keys come from a weight that {readers[0]} reads too"
    why = next((why for columns in (query, key) if (why := _module(survey, columns)) is not None), None)
    return why or why_bent(survey, site)


def _weights(site: AttentionSite) -> list[str]:
    return [site.columns[part].parameter for part in site.columns if part != "v"]


def _module(survey: Survey, columns: HeadRows) -> str | None:
    """Why the module of a projection cannot norm its output."""
    path, trace = projection(columns), survey.trace
    named = dict(survey.model.named_parameters())
    weight = named.get(columns.parameter)
    if weight is None or not weight.is_floating_point():
        return f"{columns.parameter} holds no plain numbers"
    runs = [call for call in trace.calls if call.path == path and not call.composite]
    outputs = weight.shape[columns.axis]
    if len(runs) != 1:
        return f"{path} runs {len(runs)} times in one forward"
    if len(runs[0].outputs) != 1 or trace.values[runs[0].outputs[0]].shape[-1:] != (outputs,):
        return f"no module returns its queries and keys: {path} returns what the attention makes of them"
    taken = class_stays(module_at(survey.model, path))
    return None if taken is None else f"{path} cannot be changed: {taken}"
