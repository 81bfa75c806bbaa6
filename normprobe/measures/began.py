"""What a rewrite gave the parameters that it added, which training has not moved from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

NUMBERS = "normprobe_numbers"  # what modules of a patched checkpoint call the numbers that their parameters began with
_added: Any = WeakIdKeyDictionary()


def note_added(model: nn.Module, names: Iterable[str]) -> None:
    """Remember the number that all of each of these parameters is, where it is one."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        number = None if name not in named else _number(named[name])
        if number is not None:
            _added[named[name]] = number


def began(model: nn.Module) -> dict[str, float]:
    """The number that each parameter was as a rewrite added it, by name: in this process, or in the patched checkpoint
    that it was loaded from; only of those that were one number."""
    found: dict[str, float] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        listed = vars(module).get(NUMBERS, {})
        for name, parameter in module._parameters.items():
            number = listed.get(name, None if parameter is None else _added.get(parameter))
            if isinstance(number, float):
                found[f"{path}.{name}" if path else name] = number
    return found


def _number(parameter: Tensor) -> float | None:
    if parameter.is_meta or not parameter.numel():
        return None
    first = parameter.detach().flatten()[0]
    return float(first) if bool((parameter == first).all()) else None
