"""What every rewrite shares: its sites, what it does to the function that the model computes, and one handler.

A rewrite is a small frozen object that says what is to be done. It finds its sites by what was recorded of the model
(`Survey`), and changes one site at a time. Plans, undo, counting and proof are the business of `plan`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from normprobe.anatomy.build import read
from normprobe.anatomy.flow.build import build as build_flow
from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.flow.steps import Flow
from normprobe.capture.invoke import Inputs
from normprobe.capture.recorder import record
from normprobe.capture.rejections import rejections
from normprobe.capture.trace import Trace
from normprobe.errors import RewriteError
from normprobe.records import Anatomy
from normprobe.rewrites.as_stored import as_stored
from normprobe.rewrites.edits import choice
from normprobe.rewrites.ran import Running
from normprobe.rewrites.settings import check_fields
from normprobe.rewrites.unreached import with_unreached


class Effect(str, Enum):
    """What a rewrite does to the function that the model computes, from harmless to harmful."""

    EXACT = "exact"
    CALIBRATED = "calibrated"
    BREAKING = "breaking"

    @property
    def rank(self) -> int:
        """0 for exact, 1 for calibrated, 2 for breaking."""
        return (Effect.EXACT, Effect.CALIBRATED, Effect.BREAKING).index(self)

    @property
    def meaning(self) -> str:
        """The same in a sentence."""
        return {
            Effect.EXACT: "the same function; outputs move by rounding at most",
            Effect.CALIBRATED: "another function, fitted to the old one; the proof says by how much outputs move",
            Effect.BREAKING: "another function; a trained model has to be trained on",
        }[self]


@dataclass(frozen=True)
class Survey:
    """A model together with what one recorded forward says of it, and what that gave where it was kept."""

    model: nn.Module
    inputs: Inputs
    trace: Trace
    anatomy: Anatomy
    ran: Running[Any] | None = None

    @cached_property
    def flow(self) -> Flow:
        """The signal's way, one step per operation, norms and attention not yet gathered; built once for all."""
        return build_flow(self.trace, Levels(self.trace), Statics(self.model, self.trace), [])

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, ran: Running[Any] | None = None) -> Survey:
        """Record one forward of `model`, as `ran` if given, and read its Anatomy, experts that no token reached beside
        those that were; the model is left as it was.

        Raises:
            InputError: the forward raised; its own error is the cause.
        """
        with as_stored():
            with rejections(model):
                trace = record(model, inputs, ran)
            anatomy = read(model, trace).anatomy
        return cls(model, inputs, trace, with_unreached(model, trace, anatomy), ran)


@dataclass(frozen=True)
class Site:
    """One place that a rewrite will change.

    Attributes:
        path: the module that changes, "." for the root.
        change: what happens there, in a few words.
        touched: full names of parameters whose values change; they keep their identity.
        added: full names of parameters that are added.
        gone: full names of parameters that others take the place of.
        holds: what else it sets that another rewrite could set too, such as "logits of h.0.attn".
        forward: whether the module's forward changes; else its parameters alone do.
        undo_bytes: memory that undo holds for this site.
        detail: what the handler of this rewrite needs besides.
    """

    path: str
    change: str
    touched: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = field(default=(), kw_only=True)
    holds: tuple[str, ...] = field(default=(), kw_only=True)
    forward: bool = True
    undo_bytes: int = 0
    detail: Any = None

    @property
    def claims(self) -> tuple[str, ...]:
        """What no other rewrite of the same plan may change: the forward of the module, the parameters, and more."""
        forward = ("forward of " + self.path,) if self.forward else ()
        return (*forward, *self.touched, *self.added, *self.gone, *self.holds)


@dataclass(frozen=True)
class Refusal:
    """A place that needs the rewrite and cannot have it, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Sites:
    """All places that a rewrite will change, those that it refuses, and what has to be known of it besides."""

    sites: tuple[Site, ...] = ()
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Iterable[Site | Refusal | None], notes: tuple[str, ...] = ()) -> Sites:
        """What was found place by place; None is a place where nothing is to be done."""
        every = list(found)
        sites = tuple(each for each in every if isinstance(each, Site))
        return cls(sites, tuple(each for each in every if isinstance(each, Refusal)), notes)


@dataclass(frozen=True)
class Rewrite(ABC):
    """Base of every rewrite; subclasses are final frozen dataclasses whose fields are plain values.

    Attributes:
        name: name of the class, as findings give it in `fix`.
        usual: the effect, where no setting makes it another one.
        TOGETHER: whether its sites hold only all together; else each stands for itself.
        expect: how many sites the caller counts on; any other number is an error. None: one or more.
    """

    name: ClassVar[str]
    usual: ClassVar[Effect]
    TOGETHER: ClassVar[bool] = False
    expect: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expect is not None and self.expect < 0:
            expected = "expect: a number of sites from 0, or None"
            raise RewriteError(f"{self.name} cannot be made", expected=expected, found=repr(self.expect))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name the rewrite as its class."""
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name", cls.__name__)

    @property
    def effect(self) -> Effect:
        """What it does to the function that the model computes, with its settings as they are."""
        return self.usual

    @property
    def mildest(self) -> Effect:
        """The effect where its sites let it be harmless; `effect` where they make no difference."""
        return self.effect

    def effect_at(self, sites: tuple[Site, ...]) -> Effect:
        """The effect at these sites: `effect`, where they make no difference."""
        return self.effect

    @abstractmethod
    def describe(self) -> str:
        """What it does, in one line."""

    @abstractmethod
    def sites(self, survey: Survey) -> Sites:
        """What it will change in this model, and what it refuses; nothing is changed."""

    @abstractmethod
    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Change one site.

        Classes, attributes, parameters, buffers and children of modules come back by themselves, after a failure too.
        The way back of all else, which is values of tensors and what lies outside of modules, is put on `undo` before
        each step.

        Raises:
            RewriteError: the site is no longer as it was planned.
        """

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Fit what was added to the model as it was, after every site has changed; nothing to fit by default.

        Only parameters that the sites added, or touched and `change` has put on `undo`, may move.
        """
        return

    def weightless(self, sites: tuple[Site, ...]) -> bool:
        """Whether it can change these sites of a model whose parameters hold no values (meta device)."""
        return not any(site.touched for site in sites)

    @abstractmethod
    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check in the Anatomy of the changed model that every site now is what was promised.

        Raises:
            RewriteError: one is not.
        """

    def told(self, model: nn.Module, sites: tuple[Site, ...], anatomy: Anatomy) -> tuple[str, ...]:
        """What is known of the changed model now and is worth a line each; nothing by default."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The rewrite as plain values, for `load`."""
        return {"rewrite": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class ChosenRewrite(Rewrite):
    """Base of a rewrite whose places can be chosen.

    Attributes:
        only: a pattern of paths, with * and ? as in file names, or several; None for all.
    """

    only: str | tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "only", choice(self.only))
        super().__post_init__()

    def places(self, survey: Survey) -> Iterable[tuple[str, ...]]:
        """The names of every place that `only` may choose, the one that is shown first; the norms where not said
        otherwise."""
        return ((norm.path,) for norm in survey.anatomy.norms)


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`; "." is the root."""
    return model.get_submodule("" if path == "." else path)


def full_name(path: str, name: str) -> str:
    """The full name of parameter or module `name` of the module at `path`."""
    return name if path == "." else f"{path}.{name}"
