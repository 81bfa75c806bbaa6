"""Numbers, counts and names as a person reads them, and their ASCII form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from normprobe.records import Finding, Fix, Severity

SEVERITIES = tuple(Severity)

_ASCII = str.maketrans(
    {
        "–": "-", "—": "-", "−": "-", "·": "-", "…": "...", "×": "x", "√": "sqrt", "∝": "~", "→": "->",
        "²": "^2", "≥": ">=", "≤": "<=", "≈": "~", "∞": "inf", "ᵀ": "^T", "α": "alpha", "β": "beta",
        "γ": "gamma", "ε": "eps", "σ": "sigma", "Δ": "delta", "\u2019": "'", "“": '"', "”": '"', "±": "+-",
        "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#", "✗": "x", "✓": "+",
        "│": "|", "┤": "|", "└": "+", "─": "-",
    }
)  # fmt: skip

KINDS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "l2norm": "L2Norm",
    "scalenorm": "ScaleNorm",
    "batchnorm": "BatchNorm",
    "groupnorm": "GroupNorm",
    "instancenorm": "InstanceNorm",
    "lrn": "LRN",
    "grn": "GRN",
    "dyt": "DyT-like bounded map",
    "affine": "affine map",
    "identity": "identity",
    "unknown": "norm of unknown kind",
}

BRANCHES = {
    "linear_attention": "linear attention",
    "cross_attention": "cross-attention",
    "mlp": "MLP",
    "moe": "MoE",
    "ssm": "SSM",
}


def ascii_only(text: str) -> str:
    """`text` with every sign that ASCII lacks spelled out, or `?` where there is no spelling."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def number(value: float) -> str:
    """Three significant digits; whole numbers from a thousand to a million in full; nan and ∞ by name.

    Args:
        value: any float, non-finite ones included.

    Returns:
        For example `0.131`, `45.2`, `65504`, `1e-05`, `1.2e+08`, `nan`, `-∞`.
    """
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if 999.5 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def place(path: str) -> str:
    """A module path as a reader knows it; the root has none of its own."""
    return "the model itself" if path == "." else path


def stretch(path: str, until: str | None) -> str:
    """A module and how far what is said of it reaches beyond it: `layers.0 … before layers.3`."""
    return place(path) if until is None else f"{place(path)} … {until}"


def span(values: Iterable[float]) -> str:
    """`0.6–0.707`, one number where all are the same."""
    known = list(values)
    ends = dict.fromkeys(number(end) for end in (min(known), max(known)))
    return "–".join(ends)


def amount(count: int) -> str:
    """A large count with a suffix: 8321, 135M, 1.24B."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g}{suffix}"
    return f"{count:,}" if count >= 10_000 else str(count)


def verb(said: str, count: int) -> str:
    """`hold other values` for several, `holds other values` for one: the first word follows the count."""
    first, space, rest = said.partition(" ")
    one = {"are": "is"}.get(first, f"{first}s")
    return f"{one if count == 1 else first}{space}{rest}"


def plural(count: int, singular: str, several: str | None = None) -> str:
    """`1 norm`, `2 norms`; `several` gives an irregular plural."""
    return f"{count} {singular if count == 1 else several or singular + 's'}"


def mend_text(findings: Sequence[Finding]) -> str:
    """The Python call that applies the rewrites that mend findings; empty where none does."""
    calls = [f"normprobe.{fix.call(places)}" for fixes, places in mends_of(findings) for fix in fixes]
    return f"normprobe.rewrite(model, [{', '.join(calls)}])" if calls else ""


def mends_of(findings: Iterable[Finding]) -> list[tuple[tuple[Fix, ...], tuple[str, ...]]]:
    """What mends these findings: rewrites that are to be applied together, with all the places that ask for them."""
    found: list[tuple[tuple[Fix, ...], tuple[str, ...]]] = []
    for finding in findings:
        if not finding.mends:
            continue
        at = next((i for i, (fixes, _) in enumerate(found) if fixes == finding.mends), len(found))
        known = found[at][1] if at < len(found) else ()
        found[at : at + 1] = [(finding.mends, tuple(dict.fromkeys((*known, *finding.every_place))))]
    return found


def tally(severities: Iterable[Severity]) -> str:
    """`1 error, 0 warnings, 2 notes`, or `clean` when there is nothing at all."""
    counts = Counter(severities)
    if not counts:
        return "clean"
    return ", ".join(plural(counts[severity], severity.value) for severity in SEVERITIES)


def listing(names: Iterable[str]) -> str:
    """How often each name occurs, most frequent first: `30 attention, 30 MLP`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
