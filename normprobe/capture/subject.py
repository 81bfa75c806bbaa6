"""What can be run at all."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from normprobe.errors import SettingError


def check_model(model: object) -> None:
    """Refuse what cannot be run at all.

    Raises:
        SettingError: `model` is no module, a class in place of an instance, or a module that was never run and does
            not know its shapes yet.
    """
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        found = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__}: {model!r:.80}"
        hint = "call the class first: model = Model(…)" if is_class else None
        raise SettingError("model is no module", expected="a torch.nn.Module instance", found=found, hint=hint)
    lazy = next((name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)), None)
    if lazy is not None:
        raise SettingError(
            f"{type(model).__name__} is lazy: {lazy} has no shape yet",
            expected="a model whose parameters have shapes",
            found="an uninitialised parameter or buffer",
            hint="run it once first: model(inputs)",
        )
