"""How a model is called: its configuration, its forward's parameters, its vocabulary."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from normprobe.errors import InputError
from normprobe.inputs.fields import number, text_part

MAIN_NAMES = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")


@dataclass(frozen=True)
class Face:
    """The outermost module that has a configuration and names its arguments, and what it takes.

    `required` are the arguments without a default. `main` is the argument that carries the input, None where
    neither the module nor its forward says.
    """

    module: nn.Module
    config: Any
    parameters: tuple[str, ...]
    required: frozenset[str]
    main: str | None

    @classmethod
    def of(cls, model: nn.Module) -> Face:
        """The face of `model`; wrappers, whose forwards take anything, are looked through.

        Raises:
            InputError: no module of the model has a configuration.
        """
        if getattr(model.forward, "__func__", None) is nn.Module.forward:
            raise InputError(f"{type(model).__name__}: it has no forward", hint="probe one of its parts")
        for module in model.modules():
            config = getattr(module, "config", None)
            if config is None or not hasattr(config, "__dict__"):
                continue
            parameters = _named_parameters(module)
            if parameters:
                names = tuple(parameters)
                required = frozenset(name for name in names if parameters[name].default is inspect.Parameter.empty)
                return cls(module, config, names, required, _main_name(module, names))
        raise InputError(
            f"{type(model).__name__}: no inputs were given and none can be made",
            expected="a model with a .config that says what it takes",
            found="modules without one",
            hint="pass inputs: a tensor, a tuple or a dict; in a factory, return (model, inputs)",
        )

    def too_little(self, wanted: str) -> InputError:
        """The error for a configuration that does not say `wanted`."""
        return InputError(
            f"{type(self.module).__name__}: no inputs were given and none can be made",
            expected=f"a configuration that says {wanted}",
            found=f"forward({', '.join(self.parameters[:6])}, …), {type(self.config).__name__}",
            hint="pass inputs: a tensor, a tuple or a dict; in a factory, return (model, inputs)",
        )

    def vocabulary(self) -> int:
        """Number of ids that the model takes: rows of its embedding, or fewer if the configuration says so.

        Raises:
            InputError: neither is there.
        """
        declared = number(text_part(self.config), ("vocab_size",))
        rows = _embedding_rows(self.module)
        known = [size for size in (declared, rows) if size is not None]
        if not known:
            raise self.too_little("how large the vocabulary is (vocab_size)")
        return min(known)


def _named_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C has no signature to read
        return {}
    return {parameter.name: parameter for parameter in found if parameter.kind not in kinds}


def _main_name(module: nn.Module, parameters: tuple[str, ...]) -> str | None:
    declared = getattr(module, "main_input_name", None)
    if declared in parameters:
        return str(declared)
    return next((name for name in MAIN_NAMES if name in parameters), None)


def _embedding_rows(module: nn.Module) -> int | None:
    getter = getattr(module, "get_input_embeddings", None)
    try:
        embedding = getter() if callable(getter) else None
    except (NotImplementedError, AttributeError):  # transformers raises these where there is no embedding
        return None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
