"""Act on the stream where it passes a module: on one argument of its forward, or on the first tensor it returns."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.errors import RewriteError
from normprobe.rewrites.boundary import Boundary
from normprobe.rewrites.swap import Layer, lay


class AtInput(Layer):
    """Changes one argument before the forward below sees it.

    Each subclass gets a forward of its own, since several may lie over one module.

    Attributes:
        KEY: of the attribute that holds position and name of the argument; one a subclass.
    """

    KEY: ClassVar[str]

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """What becomes of the argument; subclasses say."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass that says what to do its forward."""
        super().__init_subclass__(**kwargs)
        if "normprobe_act" not in cls.__dict__:
            return

        def forward(self: AtInput, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _changed(self, cls, args, kwargs)
            return super(cls, self).forward(*args, **kwargs)

        forward.__doc__ = "As the module's own forward."
        cls.forward = forward


def _changed(
    module: AtInput, layer: type[AtInput], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with one of them changed by `layer`."""
    index, name = module.__dict__[layer.KEY]
    if name in kwargs:
        return args, {**kwargs, name: layer.normprobe_act(module, kwargs[name])}
    if 0 <= index < len(args):
        return (*args[:index], layer.normprobe_act(module, args[index]), *args[index + 1 :]), kwargs
    raise RewriteError(
        f"{type(module).__name__} was called without the argument that a rewrite acts on ({layer.NOTE})",
        expected=f"argument {name or index}",
        found=f"{len(args)} positional arguments, and {', '.join(kwargs) or 'none'} by keyword",
    )


class AtOutput(Layer):
    """Changes the first tensor that the forward below returns. Each subclass gets a forward of its own."""

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """What becomes of the tensor; subclasses say."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass that says what to do its forward."""
        super().__init_subclass__(**kwargs)
        if "normprobe_act" not in cls.__dict__:
            return

        def forward(self: AtOutput, *args: Any, **kwargs: Any) -> Any:
            output = super(cls, self).forward(*args, **kwargs)
            return _first(self, cls, output)

        forward.__doc__ = "As the module's own forward."
        cls.forward = forward


def _first(module: AtOutput, layer: type[AtOutput], output: Any) -> Any:
    """`output` with its first tensor changed by `layer`."""
    if isinstance(output, Tensor):
        return layer.normprobe_act(module, output)
    leaves, tree = pytree.tree_flatten(output)
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    leaves[place] = layer.normprobe_act(module, leaves[place])
    return pytree.tree_unflatten(leaves, tree)


def lay_at(boundary: Boundary, layers: tuple[type[AtInput], type[AtOutput]], module: nn.Module) -> None:
    """Lay the first of `layers` over the class of `module` where the boundary is its input, else the second."""
    at_input, at_output = layers
    if boundary.side == "output":
        lay(module, at_output, boundary.path)
        return
    module.__dict__[at_input.KEY] = (boundary.index, boundary.name)
    lay(module, at_input, boundary.path)
