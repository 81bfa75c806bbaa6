"""What a planted fault is: where it can be, how it gets there, what a probe needs to see it, and what it has to say.

Operators know a model by its Anatomy alone. They reach parameters by the paths that it names (gains, writers, readers,
rows of queries), modules by the paths of norms, adds and blocks, and operations by their `OpSite`; no class and no
attribute is named.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.optim import Optimizer

from normprobe.records import Anatomy

Level: TypeAlias = Literal["structure", "forward", "backward"]
Severity: TypeAlias = Literal["error", "warning", "note"]


class NotHereError(Exception):
    """The Anatomy names a place that this model does not let be changed so; the fault does not apply there."""


@dataclass(frozen=True)
class Site:
    """A place for a fault: what the Anatomy calls it, and what the operator needs to know of it."""

    path: str
    detail: Any = None


@dataclass(frozen=True)
class Conditions:
    """What a probe has to be asked for to see a fault.

    Attributes:
        level: of the probe.
        dtype: of weights and floating inputs, by name; None leaves them.
        measures: further measures.
        optimizer: made for the model with the fault, from the model.
        sound: the optimiser for the model without it.
        inputs: changes the inputs before the model sees them, with the fault or without.
        prepare: changes the model, with its inputs at hand, before anything is planted; the untouched one too.
        around: what every probe runs in, such as a group of processes.
        states: a fact that the configuration has to state (`normprobe.records.declared`); else the fault does not
            apply.
    """

    level: Level = "structure"
    dtype: str | None = None
    measures: tuple[str, ...] = ()
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    sound: Callable[[nn.Module, Anatomy], Optimizer] | None = None
    inputs: Callable[[Any], Any] | None = None
    prepare: Callable[[nn.Module, Anatomy, Any], None] | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    states: str | None = None


Sites: TypeAlias = Callable[[Anatomy], list[Site]]
Change: TypeAlias = Callable[[nn.Module, Anatomy, Site], None]


@dataclass(frozen=True)
class Fault:
    """One way to break a model.

    Attributes:
        name: what was done, in words.
        code: the check that has to find it.
        severity: the mildest severity that the finding may have, or what gives it for a site.
        applies: the sites of an Anatomy.
        change: plants it at one of them.
        conditions: what the probe needs.
        also: codes of other checks that say the truth about this fault, and may sort in front.
    """

    name: str
    code: str
    severity: Severity | Callable[[Anatomy, Site], Severity]
    applies: Sites
    change: Change
    conditions: Conditions = field(default_factory=Conditions)
    also: frozenset[str] = frozenset()

    def plant(self, model: nn.Module, anatomy: Anatomy, seed: int, known: Container[str] = ()) -> Site:
        """Plant the fault at one of its sites but those `known` to have it, chosen by `seed`.

        Raises:
            NotHereError: there is no site, or the one that was chosen cannot be changed.
        """
        sites = [site for site in self.applies(anatomy) if site.path not in known]
        if not sites:
            raise NotHereError(f"{self.name}: no site")
        site = random.Random(f"{self.name}/{seed}").choice(sites)
        self.change(model, anatomy, site)
        return site

    def least(self, anatomy: Anatomy, site: Site) -> Severity:
        """The mildest severity that its finding may have."""
        return self.severity if isinstance(self.severity, str) else self.severity(anatomy, site)


def fault(
    name: str,
    code: str,
    severity: Severity | Callable[[Anatomy, Site], Severity],
    applies: Sites,
    conditions: Conditions | None = None,
    also: tuple[str, ...] = (),
) -> Callable[[Change], Fault]:
    """Make the function below it a fault that is planted by it."""

    def made(change: Change) -> Fault:
        return Fault(name, code, severity, applies, change, conditions or Conditions(), frozenset(also))

    return made
