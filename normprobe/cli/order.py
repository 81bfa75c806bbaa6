"""In which order the options of a command were given, which their values alone do not tell."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

_KEY = "normprobe.order"


class InOrder(TyperCommand):
    """A command that notes the order of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer calls it."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_KEY] = tuple(parameter.name for parameter in given)
        return super().parse_args(ctx, args)


def order_of(context: typer.Context) -> tuple[str, ...]:
    """The names of the options as they stand on the command line, one that was given twice at both places."""
    found: tuple[str, ...] = context.meta[_KEY]
    return found
