"""The distance of healthy models from the limits of the checks, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.healthy import GROUPS, short
from normprobe.checks import ALL

NAMES = {
    "trained": "trained",
    "demo": "the demo",
    "deep": "deep, of transformers and torch",
    "registered": "classes that transformers registers, small",
    "truth": "models whose facts were read by hand, small",
}
NEAREST = 3  # models named in a row


class Near(NamedTuple):
    """A model and where it turns: the value of the limit at which the check begins to speak of it."""

    at: float
    model: str


def models_text(results: Sequence[dict[str, Any]]) -> str:
    """What was probed: a row a group, and what was left out with the reason."""
    lines = ["| models | probed | with gradients | not built |", "|---|---|---|---|"]
    for group in GROUPS:
        mine = [one for one in results if one["name"].split(":", 1)[0] == group]
        counts = Counter(one["outcome"] for one in mine)
        backward = sum(one.get("level") == "backward" for one in mine)
        lines.append(f"| {NAMES[group]} | {counts['probed']} | {backward} | {counts['not built']} |")
    return "\n".join(lines)


def turns_table(results: Sequence[dict[str, Any]], code: str, only: str = "") -> str:
    """A row for each limit of the checks whose codes begin with `code`; empty where no model comes near one."""
    rows = list(_rows(results, code, only))
    head = [
        "| limit | its value | models | sound, and nearest to it | beyond it | trained |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) if rows else ""


def _rows(results: Sequence[dict[str, Any]], code: str, only: str) -> Iterator[str]:
    for check in ALL:
        if not check.code.startswith(code) or not check.code.startswith(only):
            continue
        for limit in check.limits():
            places, rising = _places(results, check.code, limit.name)
            if places:
                yield _row(f"{check.code} `{limit.name}`", limit.value, places, rising, results)


def _places(results: Sequence[dict[str, Any]], code: str, limit: str) -> tuple[list[Near], bool]:
    """Where each model turns, and whether that is sound below the limit."""
    found, rising = [], True
    for one in results:
        for turn in one["turns"]:
            if (turn["code"], turn["limit"]) == (code, limit):
                found.append(Near(turn["at"], one["name"]))
                rising = turn["rising"]
    return found, rising


def _row(name: str, limit: float, places: list[Near], rising: bool, results: Sequence[dict[str, Any]]) -> str:
    trained = {one["name"] for one in results if one["name"].startswith("trained:")}
    others = [place for place in places if place.model not in trained]
    sound = [place for place in others if (place.at <= limit if rising else place.at >= limit)]
    beyond = [place for place in others if place not in sound]
    nearest = sorted(sound, key=lambda place: -place.at if rising else place.at)[:NEAREST]
    told = "; ".join(f"{place.at:.2g} ({short(place.model)})" for place in nearest) or "–"
    out = f"{len(beyond)}: {_span([place.at for place in beyond])}" if beyond else "none"
    own = "; ".join(f"{short(place.model)} {place.at:.2g}" for place in places if place.model in trained) or "–"
    way = "at most" if rising else "at least"
    return f"| {name} | {way} {limit:.3g} | {len(others)} | {told} | {out} | {own} |"


def _span(values: Sequence[float]) -> str:
    low, high = (f"{end:.2g}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
