"""Measures that run only when they are asked for: their names, what they tell, and the passes that each costs."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

ExtraName = Literal["gain", "jacobian", "smoothness", "batchnorm", "depth", "norms", "cost", "precision"]
EXTRA_NAMES: tuple[ExtraName, ...] = get_args(ExtraName)


class About(NamedTuple):
    """What a measure tells, in one line, and which passes it takes beyond those of the level."""

    tells: str
    passes: str


ABOUT: dict[ExtraName, About] = {
    "batchnorm": About(
        "batch against stored statistics, train against eval mode, half the batch",
        "3 forwards: eval mode, batch norms in train mode, the same with the batch in halves",
    ),
}
