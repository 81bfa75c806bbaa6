"""Commands whose options are the fields of a dataclass, so that each is written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

_Options = TypeVar("_Options")


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Makes a function of one dataclass into a command that typer reads as if each field were a parameter.

    Args:
        options: a dataclass; the types of its fields say how typer shows them.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in dataclasses.fields(options)]  # type: ignore[arg-type]

    def made(function: Callable[[_Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return made


def _parameter(field: dataclasses.Field[Any], kind: Any) -> Parameter:
    default = Parameter.empty if field.default is dataclasses.MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
