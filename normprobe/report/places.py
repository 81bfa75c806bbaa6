"""Many module paths in few words: runs of layers become ranges, long paths lose their middle."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_INDEX = re.compile(r"(?<![^.#:])(?:0|[1-9][0-9]*)(?![^.#:])")
_CODE = re.compile(r"NP\d{3}\b")
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def shorten(path: str, width: int) -> str:
    """`path` in at most `width` characters, the middle replaced by `…`; the end stays, it names the module.

    Args:
        path: a dotted module path, or a file's path.
        width: room in characters, at least 1.
    """
    if len(path) <= width:
        return path
    separator = "/" if "/" in path else "."
    head, *rest = path.split(separator)
    for start in range(1, len(rest)):
        candidate = f"{head}…{separator if separator == '/' else ''}" + separator.join(rest[start:])
        if len(candidate) <= width:
            return candidate
    left = max(0, (width - 1) // 3)
    right = max(0, width - 1 - left)
    return path[:left] + "…" + path[len(path) - right :]


def ranges(paths: Iterable[str]) -> list[str]:
    """Paths that differ in their numbers only become one with ranges, and siblings share their parent.

    Args:
        paths: module paths; doubles count once.

    Returns:
        For example `["model.layers.0–29.{input_layernorm, post_attention_layernorm}", "model.norm"]`; every
        path is covered and no path that was not given is.
    """
    distinct = list(dict.fromkeys(paths))
    shapes = _grouped(distinct, lambda path: tuple(_INDEX.split(path)))
    merged = [text for shape, members in shapes.items() for text in _merge(shape, members)]
    families = _grouped(merged, _parent).items()
    return [text for parent, names in families for text in ([_siblings(parent, names)] if parent else names)]


def joined(paths: Iterable[str], width: int, most: int = 4) -> str:
    """`ranges` as one text, each at most `width` long; beyond `most` the rest is counted."""
    texts = [shorten(text, width) for text in ranges(paths)]
    shown = ", ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"


def skipped_text(what: Iterable[str], width: int) -> str:
    """What was skipped for one reason: every check by its code, never cut, and paths as in `joined`."""
    items = list(what)
    coded = [item for item in items if _CODE.match(item)]
    paths = [item for item in items if not _CODE.match(item)]
    return ", ".join([*coded, *([joined(paths, width)] if paths else [])])


def _grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _merge(shape: tuple[str, ...], paths: Sequence[str]) -> list[str]:
    """Paths of one shape (the texts between numbers): compress one position after another while all others agree."""
    rows: list[tuple[str, ...]] = [tuple(_INDEX.findall(path)) for path in paths]
    for position in range(len(shape) - 1):
        others = _grouped(rows, lambda row, at=position: row[:at] + row[at + 1 :])  # type: ignore[misc]
        rows = [
            (*rest[:position], _runs([row[position] for row in group]), *rest[position:])
            for rest, group in others.items()
        ]
    return [_filled(shape, row) for row in rows]


def _filled(shape: tuple[str, ...], labels: Sequence[str]) -> str:
    return shape[0] + "".join(label + part for label, part in zip(labels, shape[1:], strict=True))


def _runs(labels: Sequence[str]) -> str:
    """`0–3,5,7–9` for numbers; a single one stays as it is."""
    if len(labels) == 1:
        return labels[0]
    runs: list[list[int]] = []
    for value in sorted({int(label) for label in labels}):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _siblings(parent: str, paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    names = ", ".join(path.rpartition(".")[2] for path in paths)
    return f"{parent}.{{{names}}}"
