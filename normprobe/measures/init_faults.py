"""What keeps drawn weights from learning, or shows that another recipe was meant."""

from __future__ import annotations

import math

from normprobe.anatomy.weights.blocked import Zeros
from normprobe.measures.draws import Fit
from normprobe.measures.recipes import Drawn, recipes
from normprobe.records import Anatomy, Measurements, WeightSite
from normprobe.records.init import BlockedBranch
from normprobe.records.parts import whole

_DRAWN = ("normal", "truncated_normal", "uniform")
_BY_FAN = ("lecun", "kaiming", "torch_default")


def misread(site: WeightSite, found: Fit) -> tuple[str, ...]:
    """The recipes by fan_in that fit with another count than the inputs that are summed over: the outputs, or what
    torch's initialisers count from the shape, whose second axis and all behind it they take for the inputs. A count of
    1 is none: what fits it was drawn with a standard deviation of about 1, as plain draws are."""
    if site.kind == "embedding" or len(site.shape) < 2 or found.distribution not in _DRAWN:
        return ()
    counted = math.prod(site.shape[1:])
    wrong = {site.fan_out, counted} - {site.fan_in, 1}
    drawn = tuple(Drawn(fan, fan, (), False, found.distribution) for fan in wrong)
    if not drawn:
        return ()
    return tuple(name for name in recipes(drawn, found.interval, found.cut) if name in _BY_FAN)


def with_blocked(measured: Measurements, anatomy: Anatomy, zeros: Zeros) -> Measurements:
    """The measurements with the parameters of weights as drawn that are 0 and stay so, gathered by branch; those of no
    branch by their module; and with the branches that start closed."""
    if measured.init is None or measured.init.trained:
        return measured
    places = {
        name: (stream.name, index, branch.place)
        for stream in reversed(anatomy.streams)
        for index, branch in reversed(list(enumerate(stream.branches)))
        for name in branch.parameters
    }
    found: dict[tuple[str | None, int | None, str], list[str]] = {}
    for name in zeros.stay:
        found.setdefault(places.get(whole(name, places), (None, None, name.rpartition(".")[0] or ".")), []).append(name)
    blocked = tuple(
        BlockedBranch(stream=stream, branch=index, path=path, zeros=tuple(held))
        for (stream, index, path), held in found.items()
    )
    closed = tuple(
        (stream.name, index)
        for stream in anatomy.streams
        for index, branch in enumerate(stream.branches)
        if zeros.late.issuperset(branch.parameters) and branch.parameters
    )
    return measured.model_copy(update={"init": measured.init.model_copy(update={"blocked": blocked, "closed": closed})})
