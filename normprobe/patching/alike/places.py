"""Where each parameter of a model is, as the data flow tells it, so that another model's can be found in its place."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Anatomy, NormSite, Stream
from normprobe.records.parts import whole
from normprobe.rewrites.base import Survey
from normprobe.rewrites.biases import find_biases

Place = frozenset[tuple[object, ...]]
_BEHIND, _OFFSET = "behind", "offset"


def places(survey: Survey) -> dict[str, Place]:
    """All that is known of the place of each parameter: of which attention site, branch and stream it is a part, and
    what it does there. Parameters whose place is not known are left out."""
    named = dict(survey.model.named_parameters())
    found: dict[str, set[tuple[object, ...]]] = {}
    for name, tag in _tags(survey.anatomy):
        found.setdefault(whole(name, named), set()).add(tag)
    for weight, biases in find_biases(survey, named).items():
        for bias in biases:
            found.setdefault(bias.parameter, set()).update((_BEHIND, *tag) for tag in found.get(weight, ()))
    return {name: frozenset(tags) for name, tags in found.items() if tags and name in named}


def is_bias(place: Place) -> bool:
    """Whether what is there is only ever added: 0 is as good as none."""
    return bool(place) and all(tag[0] == _BEHIND or tag[-1] == _OFFSET for tag in place)


def _tags(anatomy: Anatomy) -> Iterator[tuple[str, tuple[object, ...]]]:
    for norm, tag in _norms(anatomy):
        yield from _affine(anatomy.norm(norm), tag)
    for number, site in enumerate(anatomy.attention):
        for part, rows in site.columns.items():
            yield rows.parameter, ("attention", number, part)
    for weight in anatomy.weights:
        where = (weight.stream, weight.branch, weight.kind)
        yield from ((weight.parameter, ("weight", role, weight.followed_by, *where)) for role in weight.roles)


def _norms(anatomy: Anatomy) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The paths of norms with what they norm."""
    for number, site in enumerate(anatomy.attention):
        if site.qk_norm is not None:
            yield from ((path, ("query norm", number)) for path in filter(None, (site.qk_norm.query,)))
            yield from ((path, ("key norm", number)) for path in filter(None, (site.qk_norm.key,)))
    for number, stream in enumerate(anatomy.streams):
        yield from ((path, (*tag, number)) for path, tag in _of_stream(stream))


def _of_stream(stream: Stream) -> Iterator[tuple[str, tuple[object, ...]]]:
    ends = {"entry norm": stream.entry_norm, "final norm": stream.final_norm}
    yield from ((path, (what,)) for what, path in ends.items() if path is not None)
    for number, branch in enumerate(stream.branches):
        around = {"pre norm": branch.pre_norm, "output norm": branch.output_norm, "post norm": branch.post_norm}
        yield from ((path, (what, number)) for what, path in around.items() if path is not None)


def _affine(norm: NormSite | None, tag: tuple[object, ...]) -> Iterator[tuple[str, tuple[object, ...]]]:
    if norm is not None:
        yield from ((name, (*tag, "gain")) for name in filter(None, (norm.weight,)))
        yield from ((name, (*tag, _OFFSET)) for name in filter(None, (norm.bias,)))
