"""Act on the stream where it passes a module: on one argument of its forward, or on the first tensor it returns."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.errors import RewriteError
from normprobe.rewrites.boundary import Boundary
from normprobe.rewrites.swap import Layer, lay


class AtInput(Layer):
    """Changes one argument before the forward below sees it.

    Attributes:
        key: of the attribute that holds position and name of the argument; one a subclass.
    """

    key: ClassVar[str]

    def act(self, stream: Tensor) -> Tensor:
        """What becomes of the argument; subclasses say."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        index, name = self.__dict__[self.key]
        if name in kwargs:
            kwargs = {**kwargs, name: self.act(kwargs[name])}
        elif 0 <= index < len(args):
            args = (*args[:index], self.act(args[index]), *args[index + 1 :])
        else:
            raise RewriteError(
                f"{type(self).__name__} was called without the argument that a rewrite acts on ({self.note})",
                expected=f"argument {name or index}",
                found=f"{len(args)} positional arguments, and {', '.join(kwargs) or 'none'} by keyword",
            )
        return super().forward(*args, **kwargs)


class AtOutput(Layer):
    """Changes the first tensor that the forward below returns."""

    def act(self, stream: Tensor) -> Tensor:
        """What becomes of the tensor; subclasses say."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return self.act(output)
        leaves, tree = pytree.tree_flatten(output)
        place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        leaves[place] = self.act(leaves[place])
        return pytree.tree_unflatten(leaves, tree)


def lay_at(
    boundary: Boundary, layers: tuple[type[AtInput], type[AtOutput]], module: nn.Module, undo: ExitStack
) -> None:
    """Lay the first of `layers` over the class of `module` where the boundary is its input, else the second."""
    at_input, at_output = layers
    if boundary.side == "output":
        lay(module, at_output, boundary.path, undo)
        return
    undo.callback(module.__dict__.pop, at_input.key, None)
    module.__dict__[at_input.key] = (boundary.index, boundary.name)
    lay(module, at_input, boundary.path, undo)
