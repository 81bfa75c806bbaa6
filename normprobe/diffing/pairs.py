"""Which parts of two models belong together: by their order in the data flow, never by their names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TypeVar

from normprobe.records import Anatomy, AttentionSite, Branch, NormSite, Skipped, Stream
from normprobe.records.diff import Match, Subject

Part = TypeVar("Part")
Side = Callable[[Branch], Hashable]
_ORDER = "there are {} in A and {} in B, and nothing tells which of them belong together"


@dataclass(frozen=True)
class NormPair:
    """Two norms at the same place: `slot` names it ("pre_norm", "final_norm", "query norm", a role)."""

    a: NormSite
    b: NormSite
    slot: str


@dataclass(frozen=True)
class BranchPair:
    """Two branches, with the streams that they belong to and their places there."""

    a: Branch
    b: Branch
    stream: str
    index: tuple[int, int]
    streams: tuple[int, int]


@dataclass(frozen=True)
class Lone:
    """A part that one model has and the other lacks; `path` is its place, `near` the place in the other model."""

    subject: Subject
    what: str
    side: str
    path: str
    near: str = ""


@dataclass
class Pairs:
    """Everything that was matched, and what was not; `alone` holds the branches that one model lacks."""

    streams: list[tuple[Stream, Stream]] = field(default_factory=list)
    branches: list[BranchPair] = field(default_factory=list)
    norms: list[NormPair] = field(default_factory=list)
    attention: list[tuple[AttentionSite, AttentionSite]] = field(default_factory=list)
    lone: list[Lone] = field(default_factory=list)
    alone: tuple[list[Branch], list[Branch]] = field(default_factory=lambda: ([], []))
    skipped: list[Skipped] = field(default_factory=list)

    def matched(self) -> tuple[Match, ...]:
        """The pairs as the report lists them."""
        named: list[tuple[Subject, str, str]] = [("stream", a.name, b.name) for a, b in self.streams]
        named += [("branch", _label(p.a), _label(p.b)) for p in self.branches]
        named += [("norm", p.a.path, p.b.path) for p in self.norms]
        named += [("attention", a.path, b.path) for a, b in self.attention]
        return tuple(Match(subject=subject, a=a, b=b) for subject, a, b in named)


def pair(a: Anatomy, b: Anatomy, print_a: Side, print_b: Side) -> Pairs:
    """Match the parts of two Anatomies.

    Args:
        a: of the first model.
        b: of the second model.
        print_a: what tells a branch of A from another one of its kind: a mark of its weights.
        print_b: the same for B.
    """
    found = Pairs()
    streams, only_a, only_b = aligned(a.streams, b.streams, _kinds, _kinds)
    if only_a and only_b:
        why = _ORDER.format(len(a.streams), len(b.streams))
        found.skipped += [Skipped(what=f"stream {s.name}", why=why) for s in (*only_a, *only_b)]
    else:
        found.lone += [Lone("stream", "residual stream", "a", s.name) for s in only_a]
        found.lone += [Lone("stream", "residual stream", "b", s.name) for s in only_b]
    for one, other in streams:
        found.streams.append((one, other))
        _branches(found, (a, b), (one, other), (print_a, print_b))
    _attention(found, a, b)
    _norms(found, a, b)
    return found


def aligned(
    a: Sequence[Part], b: Sequence[Part], key_a: Callable[[Part], Hashable], key_b: Callable[[Part], Hashable]
) -> tuple[list[tuple[Part, Part]], list[Part], list[Part]]:
    """Pairs in order, and what is left of each side: by place where both have as many, else where keys agree."""
    if len(a) == len(b):
        return list(zip(a, b, strict=True)), [], []
    matcher = SequenceMatcher(None, [key_a(x) for x in a], [key_b(x) for x in b], autojunk=False)
    blocks = matcher.get_matching_blocks()
    places = [(one.a + step, one.b + step) for one in blocks for step in range(one.size)]
    left_a, left_b = {i for i, _ in places}, {j for _, j in places}
    rest_a = [x for i, x in enumerate(a) if i not in left_a]
    rest_b = [x for j, x in enumerate(b) if j not in left_b]
    return [(a[i], b[j]) for i, j in places], rest_a, rest_b


def _kinds(stream: Stream) -> tuple[str, ...]:
    return tuple(branch.kind for branch in stream.branches)


def _label(branch: Branch) -> str:
    return f"{branch.block or branch.path} ({branch.kind.replace('_', ' ')})"


def _branches(
    found: Pairs, anatomies: tuple[Anatomy, Anatomy], streams: tuple[Stream, Stream], prints: tuple[Side, Side]
) -> None:
    one, other = streams
    pairs, only_a, only_b = aligned(one.branches, other.branches, _kind, _kind)
    if only_a or only_b:
        marked = aligned(one.branches, other.branches, *(_both(side) for side in prints))
        if 2 * len(marked[0]) > min(len(one.branches), len(other.branches)):
            pairs, only_a, only_b = marked
        else:
            why = "there are more of the kind than in the other model; which ones are extra cannot be told from the "
            why += "order alone, so that the first of both were compared"
            found.skipped.append(Skipped(what=f"which branches of {one.name} belong together", why=why))
    places = tuple({id(branch): i for i, branch in enumerate(stream.branches)} for stream in streams)
    at = anatomies[0].streams.index(one), anatomies[1].streams.index(other)
    for x, y in pairs:
        found.branches.append(BranchPair(x, y, one.name, (places[0][id(x)], places[1][id(y)]), at))
    for side, left, held in (("a", only_a, found.alone[0]), ("b", only_b, found.alone[1])):
        held += left
        found.lone += [Lone("branch", f"{x.kind.replace('_', ' ')} branch", side, _label(x)) for x in left]


def _kind(branch: Branch) -> Hashable:
    return branch.kind


def _both(mark: Side) -> Side:
    return lambda branch: (branch.kind, mark(branch))


def _attention(found: Pairs, a: Anatomy, b: Anatomy) -> None:
    if len(a.attention) == len(b.attention):
        found.attention += zip(a.attention, b.attention, strict=True)
        return
    taken: set[int] = set()
    for branch in found.branches:
        one = next((s for s in a.attention if id(s) not in taken and _inside(s, branch.a)), None)
        other = next((s for s in b.attention if id(s) not in taken and _inside(s, branch.b)), None)
        if one is not None and other is not None:
            found.attention.append((one, other))
            taken |= {id(one), id(other)}
    sides = (("A", a.attention, found.alone[0]), ("B", b.attention, found.alone[1]))
    rest = [
        (side, site)
        for side, sites, alone in sides
        for site in sites
        if id(site) not in taken and not any(_inside(site, branch) for branch in alone)
    ]
    why = "no branch of the other model that was matched has an attention site to compare it with"
    found.skipped += [Skipped(what=f"attention {site.path} of {side}", why=why) for side, site in rest]


def _inside(site: AttentionSite, branch: Branch) -> bool:
    """Whether the queries of an attention site come from a weight of the branch."""
    rows = site.columns.get("q")
    return rows is not None and rows.parameter in branch.parameters


def _norms(found: Pairs, a: Anatomy, b: Anatomy) -> None:
    """Norms by their places on streams, branches and attention sites; the others by role and order."""
    taken_a, taken_b = ({norm for branch in alone for norm in _norms_of(branch)} for alone in found.alone)
    for x, y in found.attention:
        if (x.qk_norm is None) != (y.qk_norm is None):  # the attention site says it
            taken_a |= set(_of_queries(x))
            taken_b |= set(_of_queries(y))
    for subject, slot, path_a, path_b, near in _slots(found):
        one = a.norm(path_a) if path_a else None
        other = b.norm(path_b) if path_b else None
        if one is not None and other is not None:
            if one.path not in taken_a or other.path not in taken_b:
                found.norms.append(NormPair(one, other, slot))
        elif (one is None) != (other is None) and subject is not None:
            side, path = ("a", one.path) if one is not None else ("b", other.path if other is not None else "")
            found.lone.append(Lone("norm", slot.replace("_", " "), side, path, near[side == "a"]))
        taken_a |= {one.path} if one is not None else set()
        taken_b |= {other.path} if other is not None else set()
    whole = not any(lone.subject in ("stream", "branch") for lone in found.lone)
    _others(found, _left(a, taken_a), _left(b, taken_b), whole)


def _norms_of(branch: Branch) -> Iterator[str]:
    return (norm for norm in (branch.pre_norm, branch.output_norm, branch.post_norm) if norm is not None)


def _of_queries(site: AttentionSite) -> Iterator[str]:
    held = site.qk_norm
    return (norm for norm in (held.query, held.key) if norm is not None) if held is not None else iter(())


def _left(anatomy: Anatomy, taken: set[str]) -> list[NormSite]:
    return [norm for norm in anatomy.norms if norm.path not in taken and norm.executed]


def _slots(found: Pairs) -> Iterator[tuple[str | None, str, str | None, str | None, tuple[str, str]]]:
    """(what to say where one is lacking or None, place, path in A, path in B, places near it) of every norm."""
    for one, other in found.streams:
        yield "stream", "entry_norm", one.entry_norm, other.entry_norm, (one.name, other.name)
    for each in found.branches:
        x, y = each.a, each.b
        told = "branch" if x.placement == y.placement else None  # else the placement says it
        for slot in ("pre_norm", "output_norm", "post_norm"):
            yield told, slot, getattr(x, slot), getattr(y, slot), (x.path, y.path)
    for p, q in found.attention:
        if p.qk_norm is not None and q.qk_norm is not None:
            yield "attention", "query norm", p.qk_norm.query, q.qk_norm.query, (p.path, q.path)
            yield "attention", "key norm", p.qk_norm.key, q.qk_norm.key, (p.path, q.path)
    for one, other in found.streams:
        yield "stream", "final_norm", one.final_norm, other.final_norm, (one.name, other.name)


def _others(found: Pairs, a: list[NormSite], b: list[NormSite], whole: bool) -> None:
    for role in dict.fromkeys(norm.role for norm in (*a, *b)):
        of_a, of_b = ([norm for norm in norms if norm.role == role] for norms in (a, b))
        if len(of_a) == len(of_b):
            found.norms += [NormPair(x, y, role) for x, y in zip(of_a, of_b, strict=True)]
        elif whole and not (of_a and of_b):
            found.lone += [Lone("norm", f"{role} norm", "a", x.path) for x in of_a]
            found.lone += [Lone("norm", f"{role} norm", "b", y.path) for y in of_b]
        else:
            why = _ORDER.format(len(of_a), len(of_b))
            found.skipped.append(Skipped(what=f"norms of role {role}", why=why))
