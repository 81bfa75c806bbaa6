"""Change what one module computes and nothing else: its class becomes a subclass made for it.

Why this and no hook, wrapper or parametrisation: the module object, its parameters, its children and the names of its
state stay as they are, so that optimisers, `state_dict`, `to(dtype)`, tied weights and code that holds the module go on
working. A hook would keep a reference to the old objects after `deepcopy`, a wrapper would rename parameters. The
subclass is found through the object itself, so copies, pickles and compiled graphs carry it along.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.jit import ScriptModule

from normprobe.errors import RewriteError

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # a layer stands before the module's own class, which brings nn.Module


class Layer(_Module):
    """Base of what is laid over a module's class; subclasses define `forward` and call `super().forward`.

    What a layer defines hides what the module below has by the same name, and layers lie over each other: names have to
    be its own, and looked up on the layer's class, not on the object.
    """

    NOTE: ClassVar[str]
    normprobe_name: ClassVar[str | None] = None  # of the class, where that of the class below would no longer be right
    LAST: ClassVar[bool] = False  # whether it has to see what the module returns in the end: others go below it

    def extra_repr(self) -> str:
        """The module's own text, and what was laid over its class, lowest first."""
        notes = [
            kind.__dict__["NOTE"]
            for kind in reversed(type(self).__mro__)
            if issubclass(kind, Layer) and "NOTE" in kind.__dict__
        ]
        return ", ".join(text for text in (super().extra_repr(), *notes) if text)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the class below, which can be found by its name, and the layer over it."""
        made = super().__reduce_ex__(protocol)
        kind = type(self)
        if isinstance(made, str) or made[:2] != (copyreg.__newobj__, (kind,)):  # type: ignore[attr-defined]
            return made  # the class below has a way of its own
        return (_blank, kind.__bases__, *made[2:])


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def over(layer: type[Layer], base: type[nn.Module]) -> type[nn.Module]:
    """`base` with `layer` over it, the same class every time; its name stays if it is right: some tools go by it."""
    if (layer, base) not in _classes:
        named = {"__qualname__": layer.normprobe_name or base.__qualname__}
        body = {"__module__": base.__module__, "__doc__": base.__doc__, **named}
        metaclass: Callable[..., type[nn.Module]] = type(base)
        _classes[layer, base] = metaclass(layer.normprobe_name or base.__name__, (layer, base), body)
    return _classes[layer, base]


def laid(kind: type[nn.Module], layer: type[Layer]) -> type[nn.Module]:
    """`kind` with `layer` over it, below layers that come last."""
    top = _layer(kind)
    if top is None or layer.LAST or not top.LAST:
        return over(layer, kind)
    return over(top, laid(kind.__bases__[1], layer))


def _blank(layer: type[Layer], base: type[nn.Module]) -> nn.Module:
    made: nn.Module = object.__new__(over(layer, base))
    return made


def _layer(kind: type) -> type[Layer] | None:
    """The uppermost layer of a class made by `over`, else None."""
    first = kind.__bases__[0]
    return first if len(kind.__bases__) == 2 and issubclass(first, Layer) else None


def layers_over(kind: type[nn.Module]) -> tuple[tuple[type[Layer], ...], type[nn.Module]]:
    """The layers of a class, lowest first, and the class below them."""
    top = _layer(kind)
    if top is None:
        return (), kind
    lower, base = layers_over(kind.__bases__[1])
    return (*lower, top), base


def has_layer(module: nn.Module, layer: type[Layer]) -> bool:
    """Whether `layer` lies over the module's class already."""
    return issubclass(type(module), layer)


def why_not(module: nn.Module) -> str | None:
    """Why the class of this module cannot be changed; None where it can."""
    if isinstance(module, ScriptModule):
        return "it is compiled by torch.jit"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (by hooks of accelerate, say), which hides that of its class"
    return None


def shell(module: nn.Module, layer: type[Layer]) -> nn.Module:
    """An object with the layer that shares everything with `module`, for looking at what it will do."""
    made = _blank(layer, type(module))
    made.__dict__.update(module.__dict__)
    return made


def lay(module: nn.Module, layer: type[Layer], path: str) -> None:
    """Lay `layer` over the class of `module`, the one at `path`, below layers that come last.

    Raises:
        RewriteError: it lies there already.
    """
    if has_layer(module, layer):
        raise RewriteError(
            f"{path} cannot be changed once more", expected="a module without this change", found=layer.NOTE
        )
    module.__class__ = laid(type(module), layer)
