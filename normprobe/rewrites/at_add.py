"""Act where a branch is added: on the trunk before the sum, and on the sum.

The add is an operator inside a module's forward. The module that gives the write remembers the tensor that it returned,
and while the adding module's forward runs, torch's function mode finds the addition that has this very tensor as an
operand. That holds with in-place sums, gradient checkpointing and a dropout in between; a write that no addition took
is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normprobe.errors import RewriteError
from normprobe.rewrites.at_boundary import AtOutput
from normprobe.rewrites.swap import Layer, has_layer, lay

_ADDS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__"})
_PASSED = frozenset({"dropout", "dropout_", "to", "type", "type_as", "float", "contiguous"})  # of a write on its way


@dataclass
class Link:
    """What the module that writes and the one that adds share.

    Attributes:
        alpha: factor on the trunk.
        norm: name of the adding module's child that norms the sum; None for none.
        write: the tensor that was returned and waits for its addition.
    """

    alpha: float = 1.0
    norm: str | None = None
    write: Tensor | None = None


class _Additions(TorchFunctionMode):
    """Finds the additions of pending writes."""

    def __init__(self, module: nn.Module, links: Sequence[Link]) -> None:
        super().__init__()
        self.module, self.links = module, links

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        link = self._pending(args[:2]) if name in _ADDS or name in _PASSED else None
        if link is None:
            return func(*args, **kwargs)
        if name in _PASSED:
            link.write = func(*args, **kwargs)
            return link.write
        trunk = args[1] if args[0] is link.write else args[0]
        write, link.write = link.write, None
        total = (trunk if link.alpha == 1.0 else trunk * link.alpha) + write
        return total if link.norm is None else self.module.get_submodule(link.norm)(total)

    def _pending(self, operands: Sequence[Any]) -> Link | None:
        return next((k for k in self.links if k.write is not None and any(x is k.write for x in operands)), None)


@final
class Adding(Layer):
    """Runs the forward below, and acts on its additions of writes that are linked to it."""

    NOTE = "acts where branches are added (normprobe)"
    KEY: ClassVar[str] = "_add_links"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        links: tuple[Link, ...] = self.__dict__[Adding.KEY]
        with _Additions(self, links):
            output = super().forward(*args, **kwargs)
        if any(link.write is not None for link in links):
            for link in links:
                link.write = None
            raise RewriteError(
                f"a write of {type(self).__name__} was not added as it was when its rewrite was planned",
                expected="an addition of the branch's output in this forward",
                found="none: something else than a dropout or a cast lies between",
                hint="undo the rewrite, and plan it on inputs that run this path",
            )
        return output


@final
class Linked(AtOutput):
    """Remembers the first tensor that the forward below returns."""

    NOTE = "its write is followed to its add (normprobe)"
    LAST = True
    KEY: ClassVar[str] = "_add_link"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The tensor itself."""
        self.__dict__[Linked.KEY].write = stream
        return stream


def link(writer: nn.Module, adder: nn.Module, made: Link, paths: tuple[str, str]) -> None:
    """Let `adder` act where it adds what `writer` returns; `paths` are theirs."""
    adder.__dict__[Adding.KEY] = (*adder.__dict__.get(Adding.KEY, ()), made)
    writer.__dict__[Linked.KEY] = made
    lay(writer, Linked, paths[0])
    if not has_layer(adder, Adding):
        lay(adder, Adding, paths[1])
