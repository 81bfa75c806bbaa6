"""Gather definitions of this package, and all that they need of it, into the text of one file that stands alone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from normprobe.errors import CheckpointError

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class _Definition:
    """One statement of a module that binds names."""

    module: str
    names: tuple[str, ...]
    text: str
    needs: frozenset[str]
    line: int


@dataclass(frozen=True)
class _Source:
    """A module of this package: what it defines, what it takes from the package, and its other imports by name."""

    definitions: dict[str, _Definition]
    own: dict[str, tuple[str, str]]
    foreign: dict[str, str]


def bundle(wanted: Iterable[Any], modules: Iterable[str] = ()) -> str:
    """Imports and definitions of the classes and functions `wanted`, each after what it needs.

    Args:
        wanted: of this package.
        modules: others that are imported too, for what follows in the file.

    Raises:
        CheckpointError: two modules of the package define different things by one name.
    """
    gathered = _Gathered({}, {}, {name: f"import {name}" for name in modules})
    for each in wanted:
        gathered.take(each.__module__, each.__name__)
    imports = sorted(set(gathered.imports.values()), key=lambda line: (line.startswith("from"), line))
    head = ["from __future__ import annotations", "", *imports]
    return "\n\n\n".join(["\n".join(head), *(each.text for each in gathered.taken.values())]) + "\n"


@dataclass
class _Gathered:
    """Definitions in the order in which they have to stand."""

    taken: dict[tuple[str, str], _Definition]
    owners: dict[str, tuple[str, str]]
    imports: dict[str, str]

    def take(self, module: str, name: str) -> None:
        """Add a definition, after what it needs."""
        source = _source(module)
        if name in source.own:
            self.take(*source.own[name])
            return
        if name in source.foreign:
            self._bind(name, (source.foreign[name], name))
            self.imports[name] = source.foreign[name]
            return
        found = source.definitions.get(name)
        if found is None or (module, found.names[0]) in self.taken or self._is_open(module, found):
            return
        self._bind(name, (module, name))
        for need in sorted(found.needs, key=lambda each: _line(source, each)):
            self.take(module, need)
        self.taken[module, found.names[0]] = found

    def _is_open(self, module: str, found: _Definition) -> bool:
        return self.owners.get(found.names[0]) == (module, found.names[0])

    def _bind(self, name: str, owner: tuple[str, str]) -> None:
        other = self.owners.setdefault(name, owner)
        if other != owner:
            found = f"{other[0]} and {owner[0]}"
            raise CheckpointError(f"two things are called {name}", expected="names of their own", found=found)


def _line(source: _Source, name: str) -> tuple[int, str]:
    found = source.definitions.get(name)
    return (0 if found is None else found.line, name)


@cache
def _source(module: str) -> _Source:
    loaded = importlib.import_module(module)
    text = inspect.getsource(loaded)
    definitions: dict[str, _Definition] = {}
    own: dict[str, tuple[str, str]] = {}
    foreign: dict[str, str] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for name, origin, line in _imports(statement, loaded):
                if origin is None:
                    foreign[name] = line
                else:
                    own[name] = origin
            continue
        names = tuple(_bound(statement))
        if names:
            definition = _Definition(module, names, _text(text, statement), _needs(statement), statement.lineno)
            definitions |= dict.fromkeys(names, definition)
    return _Source(definitions, own, foreign)


def _imports(
    statement: ast.Import | ast.ImportFrom, loaded: ModuleType
) -> Iterator[tuple[str, tuple[str, str] | None, str]]:
    """Each name that an import binds, where it is in this package, and a line that imports it alone."""
    for alias in statement.names:
        name = alias.asname or alias.name.partition(".")[0]
        renamed = f" as {alias.asname}" if alias.asname else ""
        if isinstance(statement, ast.Import):
            yield name, None, f"import {alias.name}{renamed}"
        elif statement.module != "__future__":
            inside = (statement.module or "").partition(".")[0] == _PACKAGE
            origin = (str(statement.module), alias.name) if inside else None
            yield name, origin, f"from {statement.module} import {alias.name}{renamed}"


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement at the top of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        yield from (each.id for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.If | ast.Try):
        for inner in (*statement.body, *statement.orelse):
            yield from _bound(inner)


def _needs(statement: ast.stmt) -> frozenset[str]:
    """Every name that occurs in it, also inside texts that are annotations."""
    found = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return frozenset(found - set(_bound(statement)))


def _text(text: str, statement: ast.stmt) -> str:
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])
