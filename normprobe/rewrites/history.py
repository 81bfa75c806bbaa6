"""Which plan changed a module last, so that plans are applied as they were made and undone the last one first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from normprobe.errors import RewriteError
from normprobe.measures.began import note_added
from normprobe.rewrites.base import Site
from normprobe.rewrites.follow import Followed
from normprobe.rewrites.stamps import Stamp, stamps
from normprobe.rewrites.way_back import Change, Structure


@dataclass(frozen=True, eq=False)
class Token:
    """Stands for one plan that is applied; it holds no module, since `_last` would never let go of it."""

    names: str


_last: WeakKeyDictionary[nn.Module, Token] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Part:
    path: str
    module: nn.Module
    kind: type[nn.Module]
    parameters: frozenset[str]
    token: Token | None

    def why_not(self, now: nn.Module | None) -> str | None:
        """How it differs from what it was; None where it does not."""
        if now is not self.module:
            return f"{self.path} is {'gone' if now is None else 'another module, ' + type(now).__name__}"
        if type(now) is not self.kind:
            return f"{self.path} is of class {type(now).__name__}, made by {type(now).__module__}"
        if _named(now) != self.parameters:
            return f"{self.path} has the parameters {', '.join(sorted(_named(now))) or 'none'}"
        return None


class Planned:
    """The modules of a model as a plan found them."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [_Part(p or ".", m, type(m), _named(m), _last.get(m)) for p, m in model.named_modules()]

    def check(self, model: nn.Module, names: str) -> None:
        """Check that the plan of these rewrites still fits `model`.

        Raises:
            RewriteError: another plan was applied or undone since, or modules have changed.
        """
        now = {path or ".": module for path, module in model.named_modules()}
        for part in self._parts:
            token = _last.get(part.module)
            if token is not part.token:
                told = f"{token.names} was applied" if token else f"{part.token.names if part.token else ''} was undone"
                raise RewriteError(
                    f"{names} was planned before {told}; nothing was changed",
                    expected=f"{part.path} as it was planned",
                    found="another plan's change of it",
                    hint="plan anew on the model as it is now",
                )
        whys = (part.why_not(now.pop(part.path, None)) for part in self._parts)
        why = next((why for why in whys if why is not None), None) or next((f"{path} is new" for path in now), None)
        if why is not None:
            raise RewriteError(
                f"the model was changed after {names} was planned; nothing was changed now",
                expected="modules and parameters as they were",
                found=why,
                hint="plan anew on the model as it is now",
            )


class Applied:
    """What one plan changes in a model: made before it, settled after it, and put back by its undo."""

    def __init__(self, model: nn.Module, names: str) -> None:
        self._names, self._model = names, model
        self._structure, self._followed = Structure(model), Followed(model)
        self._changes: tuple[Change, ...] = ()
        self._below: dict[nn.Module, Token | None] = {}
        self._token = Token(names)
        self._held = frozenset(id(parameter) for parameter in model.parameters())
        self._stamps: tuple[Stamp, ...] = ()

    def settle(self, sites: Iterable[Site], paths: Iterable[str]) -> None:
        """All has changed but values; beside what differs, owners of parameters of the sites, and modules whose forward
        they change, and those at `paths` count as changed."""
        more = _owners(self._model, tuple(sites), paths)
        self._changes, others = self._structure.settle()
        self._followed.settle()
        changed = dict.fromkeys((*(change.module for change in self._changes), *others, *more))
        self._below = {module: _last.get(module) for module in changed}

    def stand(self, sites: Iterable[Site]) -> None:
        """From now on the plan is the last one that changed these modules; what it wrote is as it left it."""
        sites = tuple(sites)
        self._stamps = tuple(stamps(self._model, self._written(sites)))
        fresh = [name for name, parameter in self._model.named_parameters() if id(parameter) not in self._held]
        note_added(self._model, {name for site in sites for name in site.added}.intersection(fresh))
        for module in self._below:
            _last[module] = self._token

    def _written(self, sites: tuple[Site, ...]) -> list[str]:
        """Parameters of which undo brings older values back: edited ones, and those made in the place of others."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        made = [name for site in sites if site.gone for name in site.added]
        fresh = [name for name in made if name in named and id(named[name]) not in self._held]
        return [*(name for site in sites for name in site.touched), *fresh]

    def check(self, anyway: bool) -> None:
        """Check that all can be put back; `anyway` values that have moved since are put back too.

        Raises:
            RewriteError: a later plan changed one of the modules, or something else has changed them.
        """
        later = [token.names for module in self._below if (token := _last.get(module)) not in (self._token, None)]
        if later:
            raise RewriteError(
                f"cannot undo {self._names}: {later[0]} was applied after it, to some of the same modules",
                expected="the last plan is undone first",
                found=f"{later[0]} still applied; nothing was changed",
                hint=f"undo {later[0]} first",
            )
        whys = ((change.path, change.moved()) for change in self._changes)
        for path, why in (*whys, *self._exchanged()):
            if why is not None:
                raise RewriteError(
                    f"cannot undo {self._names}: {path} was changed by something else since",
                    expected=f"{path} as the rewrite left it",
                    found=f"{why}; nothing was changed",
                    hint="take the later change back first",
                )
        self._check_values(anyway)
        self._followed.check(self._names)

    def _exchanged(self) -> Iterator[tuple[str, str]]:
        """Written parameters that are no longer in the model: what undo would write into them, nobody would read."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for stamp in self._stamps:
            if named.get(stamp.name) is not stamp.tensor:
                yield stamp.name, "it is another parameter" if stamp.name in named else "it is gone"

    def _check_values(self, anyway: bool) -> None:
        moved = [] if anyway else [stamp.name for stamp in self._stamps if stamp.moved()]
        if moved:
            more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
            raise RewriteError(
                f"cannot undo {self._names}: parameters that it wrote have other values since",
                expected="the values that the rewrite left, to put the old ones back beside parameters as they were",
                found=f"{moved[0]}{more}: trained, loaded, or cast to fewer bits and back; nothing was changed",
                hint="keep the rewrite, or undo(anyway=True): old values there, and all others as they are now",
            )

    def put_back(self) -> None:
        """Classes, attributes and tables as they were, what comes back kept as the model is, and the tokens."""
        inside = self._followed.inside()
        self._structure.put_back()
        self._followed.bring(inside)
        for module, token in self._below.items():
            if token is not None:
                _last[module] = token
            elif module in _last:
                del _last[module]


def _owners(model: nn.Module, sites: tuple[Site, ...], more: Iterable[str]) -> list[nn.Module]:
    named = dict(model.named_parameters(remove_duplicate=False))
    names = (name for site in sites for name in (*site.touched, *site.added))
    held = {id(named[name]) for name in names if name in named}
    paths = {*more, *(site.path for site in sites if site.forward)}
    return [
        module
        for path, module in model.named_modules()
        if (path or ".") in paths or any(id(p) in held for p in module._parameters.values())
    ]


def _named(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module._parameters.items() if parameter is not None)
