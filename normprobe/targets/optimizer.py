"""An optimiser by name: the user's own code makes it for the model, or a class of optimisers by its own defaults."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from normprobe.errors import TargetError
from normprobe.targets.factory import imported, named_error

EXPECTED = "file.py:factory or package.module:factory of a function that takes the model, or of an optimiser's class"


def load_optimizer(name: str, model: nn.Module) -> Optimizer:
    """The optimiser that `file.py:factory` or `package.module:factory` makes for `model`.

    A function is called with the model. A class of optimisers, such as `torch.optim:AdamW`, is called with all
    parameters of the model and its own defaults.

    Raises:
        TargetError: the code cannot be imported, has no such name, raises, or returns something else.
    """
    where, _, attribute = name.rpartition(":")
    if not where:
        raise TargetError("--optimizer names no factory", expected=EXPECTED, found=name)
    with imported(where, attribute, name) as found, named_error(f"{name}: the factory of the optimiser raised"):
        own = isinstance(found, type) and issubclass(found, Optimizer)
        made = found(model.parameters()) if own else found(model)
    if not isinstance(made, Optimizer):
        found_text = f"{type(made).__name__}: {made!r:.80}"
        raise TargetError(
            f"{name}: the factory returned no optimiser", expected="a torch.optim.Optimizer", found=found_text
        )
    return made
