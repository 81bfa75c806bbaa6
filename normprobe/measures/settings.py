"""What of a model is wanted: refused before anything runs where it makes no sense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from torch.optim import Optimizer

from normprobe.errors import SettingError
from normprobe.measures.extra import Progress
from normprobe.measures.loss import LossFunction
from normprobe.records import Level
from normprobe.records.extras import ABOUT, EXTRA_NAMES

_SEEDS = -(2**63), 2**64 - 1  # what `torch.manual_seed` takes


@dataclass(frozen=True)
class Wanted:
    """The settings of `probe` that say what is measured; named as there."""

    level: Level
    measures: Sequence[str]
    loss: LossFunction | None
    lr: float | None
    exact: bool
    seed: int
    tell: Progress
    optimizer: object = None


def check_wanted(wanted: Wanted) -> None:
    """Refuse settings that are unknown or without use.

    Raises:
        SettingError: for the first such setting.
    """
    level, levels = wanted.level, get_args(Level)
    if level not in levels:
        raise SettingError(f"unknown level {level!r}", expected=" | ".join(levels), found=repr(level))
    for name in wanted.measures:
        if name not in (*EXTRA_NAMES, "all"):
            raise SettingError(f"unknown measure {name!r}", expected=" | ".join(EXTRA_NAMES), found=repr(name))
    if level == "structure":
        _check_no_signal(wanted)
    _check_loss(wanted)
    _check_rate(wanted.lr, level)
    if wanted.optimizer is not None and not isinstance(wanted.optimizer, Optimizer):
        found = f"{type(wanted.optimizer).__name__}: {wanted.optimizer!r:.80}"
        raise SettingError("the optimizer is none of torch's", expected="a torch.optim.Optimizer", found=found)
    if isinstance(wanted.seed, bool) or not isinstance(wanted.seed, int):
        found = f"{type(wanted.seed).__name__}: {wanted.seed!r:.80}"
        raise SettingError("the seed is no int", expected="an int", found=found)
    if not _SEEDS[0] <= wanted.seed <= _SEEDS[1]:
        found = f"an int of {wanted.seed.bit_length()} bits"
        raise SettingError("the seed is no seed of torch", expected="an int from -2^63 to 2^64 - 1", found=found)


def _check_no_signal(wanted: Wanted) -> None:
    needed = 'level="forward" or "backward"'
    if wanted.measures:
        raise SettingError("measures need a signal", expected=needed, found=f"{wanted.measures[0]!r} at 'structure'")
    if wanted.exact:
        raise SettingError("exact= needs a signal", expected=needed, found="'structure'")


def _check_loss(wanted: Wanted) -> None:
    loss, level = wanted.loss, wanted.level
    takers = [name for name in EXTRA_NAMES if ABOUT[name].loss]
    if loss is not None and level != "backward" and not {*takers, "all"} & {*wanted.measures}:
        hint = f'pass level="backward" or one of the measures {" | ".join(takers)}, or leave loss= out'
        raise SettingError(
            "a loss was given, but no gradients are taken", expected='level="backward"', found=repr(level), hint=hint
        )
    if loss is not None and not callable(loss):
        raise SettingError("the loss is no function", expected="loss(output, inputs)", found=f"{type(loss).__name__}")


def _check_rate(lr: object, level: str) -> None:
    if lr is None:
        return
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise SettingError("the learning rate is no positive number", expected="a float above 0", found=repr(lr))
    if level != "backward":
        hint = 'pass level="backward", or leave lr= out'
        raise SettingError(
            "a learning rate was given, but no gradients are taken", expected='level="backward"', found=level, hint=hint
        )
