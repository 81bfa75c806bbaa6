"""Plan and apply rewrites, with inputs made where none are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import SettingError
from normprobe.inputs import or_made
from normprobe.rewrites import Plan, Rewrite, make_plan


def plan(model: nn.Module, rewrites: Rewrite | Sequence[Rewrite], inputs: Inputs | None = None) -> Plan:
    """What `rewrites` would change in `model`; print it, then `apply()` and `undo()` it.

    Args:
        model: any module; left bit for bit as it was.
        rewrites: one, or several that are applied in this order; each finds its sites in the model as it is now.
        inputs: a tensor, a tuple (positional) or a mapping (by keyword) that the Anatomy is read on and the proof
            stands on; None where the model's config says enough.

    Raises:
        SettingError: `model` is no module, or `rewrites` holds something else than rewrites.
        InputError: no inputs could be made, or the model rejected them.
        RewriteError: no rewrite was given, or two of them would change the same module.
    """
    check_model(model)
    return make_plan(model, check_rewrites(rewrites), or_made(model, inputs))


def rewrite(model: nn.Module, rewrites: Rewrite | Sequence[Rewrite], inputs: Inputs | None = None) -> Plan:
    """`plan(model, rewrites, inputs).apply()`.

    Raises:
        SettingError: `model` is no module, or `rewrites` holds something else than rewrites.
        InputError: no inputs could be made, or the model rejected them.
        RewriteError: a rewrite has no site or another number than it expects, did not take, or could not be proven;
            the model is then bit for bit as it was.
    """
    return plan(model, rewrites, inputs).apply()


def check_rewrites(rewrites: object) -> tuple[Rewrite, ...]:
    """The rewrites as a tuple, a single one too.

    Raises:
        SettingError: one of them is no rewrite, such as a name, or a class where an instance is expected.
    """
    given = tuple(rewrites) if isinstance(rewrites, Iterable) and not isinstance(rewrites, str) else (rewrites,)
    for each in given:
        if isinstance(each, Rewrite):
            continue
        is_class = isinstance(each, type) and issubclass(each, Rewrite)
        raise SettingError(
            "rewrites holds something that is no rewrite",
            expected="a rewrite or a list of them, such as [normprobe.AddFinalNorm()]",
            found=f"the class {each.__name__}" if isinstance(each, type) else f"{type(each).__name__}: {each!r:.80}",
            hint=f"{each.__name__}()" if isinstance(each, type) and is_class else None,
        )
    return given
