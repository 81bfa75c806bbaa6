"""What a model is made of besides the values of its parameters, and what of that a rewrite changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normprobe.errors import CheckpointError
from normprobe.rewrites.swap import laid, layers_over
from normprobe.structure.kinds import KINDS, MODULES, TORCH
from normprobe.structure.restore import main_dtype
from normprobe.structure.values import Encoder

_HELD = frozenset(vars(nn.Module())) - {"training"}  # what every module holds; torch keeps the tensors there
_NOT_KEPT = _HELD | {"training"}


@dataclass(frozen=True)
class _Part:
    """One module as it was."""

    module: nn.Module
    kind: type[nn.Module]
    values: Mapping[str, Any]
    parameters: Mapping[str, tuple[int, ...]]
    tied: frozenset[str]  # parameters that another module holds too
    buffers: frozenset[str]
    computed: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Of everything that it holds."""
        return frozenset((*self.values, *self.parameters, *self.buffers))


@dataclass(frozen=True)
class Structure:
    """The modules of a model by path, as they were when this was made; it keeps them alive."""

    parts: Mapping[str, _Part]
    dtype: torch.dtype  # that most of its numbers have

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """The structure of `model` now; every path of a module that stands at several."""
        shared = _shared(model)
        found = model.named_modules(remove_duplicate=False)
        return cls({path: _part(module, shared) for path, module in found}, main_dtype(model))

    def changes(self, model: nn.Module) -> list[dict[str, Any]]:
        """What has changed in `model` since, as `restore` takes it.

        Raises:
            CheckpointError: a module has become what cannot be written down.
        """
        return list(_Changes(self, Structure.of(model)).rows())


def _shared(model: nn.Module) -> frozenset[int]:
    seen: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return frozenset(key for key, count in seen.items() if count > 1)


def _part(module: nn.Module, shared: frozenset[int]) -> _Part:
    values = {k: v for k, v in vars(module).items() if k not in _NOT_KEPT and not isinstance(v, Tensor)}
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    return _Part(
        module=module,
        kind=type(module),
        values=values,
        parameters={name: tuple(p.shape) for name, p in parameters.items()},
        tied=frozenset(name for name, p in parameters.items() if id(p) in shared),
        buffers=frozenset(name for name, b in module._buffers.items() if b is not None),
        computed=frozenset(_computed(module)),
    )


def _layers(part: _Part) -> tuple[tuple[type[Any], ...], type[nn.Module]]:
    """The layers of a module, lowest first, and the class below them and below that of torch's parametrisation."""
    upper, below = layers_over(part.kind)
    if not part.computed:
        return upper, below
    lower, below = layers_over(below.__bases__[0])
    return (*lower, *upper), below


def _computed(module: nn.Module) -> Mapping[str, nn.Module]:
    """Torch's parametrisations of a module by the name of what they compute."""
    held = module._modules.get("parametrizations") if parametrize.is_parametrized(module) else None
    return dict(held.items()) if isinstance(held, nn.ModuleDict) else {}


@final
class _Changes:
    """Compares two structures of one model."""

    def __init__(self, before: Structure, after: Structure) -> None:
        self.before, self.after, self.dtype = before.parts, after.parts, before.dtype
        self.encoder = Encoder()
        self.places = {id(part.module): path for path, part in reversed(list(self.before.items()))}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for every module that changed, parents first."""
        for path, part in self.after.items():
            if self._is_inside_computed(path):
                continue
            had = self.before.get(path)
            row = {} if had is not None and had.module is part.module else self._placed(path, part)
            if "module" in row:
                row |= self._tensors(part, None)
            elif "from" in row:
                row |= self._changed(path, self.before[row["from"]], part)
            elif had is not None:
                row |= self._changed(path, had, part)
            if row:
                yield {"path": path, **row}
        for path in self.before:
            if path not in self.after and path.rpartition(".")[0] in self.after:
                yield {"path": path, "module": None}

    def _is_inside_computed(self, path: str) -> bool:
        """Whether this is what torch's parametrisation puts into a module, which its row says already."""
        holder, found, _ = path.rpartition(".parametrizations")
        return bool(found) and bool(self.after[holder].computed - self._had_computed(holder))

    def _had_computed(self, path: str) -> frozenset[str]:
        return self.before[path].computed if path in self.before else frozenset()

    def _placed(self, path: str, part: _Part) -> dict[str, Any]:
        """A module that was elsewhere, or is new."""
        if id(part.module) in self.places:
            return {"from": self.places[id(part.module)]}
        layers, kind = layers_over(part.kind)
        if kind not in (*MODULES, *TORCH):
            what = f"{path or 'the model'} has become a module that cannot be written down"
            raise CheckpointError(what, expected=", ".join(k.__name__ for k in (*MODULES, *TORCH)), found=str(kind))
        kept = {k: v for k, v in vars(part.module).items() if k not in _HELD}
        row: dict[str, Any] = {"module": self._made(path, kind, kept)}
        return row | self._layers(path, layers)

    def _made(self, path: str, kind: type[nn.Module], values: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind.__name__, "values": {k: self.encoder.encoded(v, f"{path}.{k}") for k, v in values.items()}}

    def _layers(self, path: str, layers: Sequence[type[Any]]) -> dict[str, Any]:
        names = [layer.__name__ for layer in layers]
        unknown = [name for name in names if name not in KINDS]
        if unknown:
            raise CheckpointError(f"{path} has a layer that cannot be written down", found=unknown[0])
        return {"layers": names} if names else {}

    def _changed(self, path: str, had: _Part, part: _Part) -> dict[str, Any]:
        """What is another in a module that is where it was."""
        computed = part.computed - had.computed
        if had.computed - part.computed:
            what = (
                f"{path} no longer computes its weights, which cannot be written down over the patch that had it do so"
            )
            raise CheckpointError(what, hint="patch what was patched then, not what came of it")
        row = self._class(path, had, part)
        fresh = {k: v for k, v in part.values.items() if k not in had.values or not _same(had.values[k], v)}
        if fresh:
            row["values"] = {k: self.encoder.encoded(v, f"{path}.{k}") for k, v in fresh.items()}
        names = (
            {*had.values, *had.parameters, *had.buffers} - {*part.values, *part.parameters, *part.buffers} - computed
        )
        if names:
            row["gone"] = sorted(names)
        if computed:
            row["computed"] = {name: self._forms(path, part.module, name) for name in sorted(computed)}
        return row | self._tensors(part, had)

    def _class(self, path: str, had: _Part, part: _Part) -> dict[str, Any]:
        (before, base), (after, below) = _layers(had), _layers(part)
        if below is base and after[: len(before)] == before:
            return self._layers(path, after[len(before) :])
        fresh = [layer for layer in after if layer not in before]
        if not part.computed and reduce(laid, fresh, had.kind) is part.kind:
            return self._layers(path, fresh)
        if below not in TORCH:
            raise CheckpointError(f"{path} has another class, which cannot be written down", found=str(part.kind))
        return {"class": below.__name__, **self._layers(path, after)}

    def _tensors(self, part: _Part, had: _Part | None) -> dict[str, Any]:
        """Parameters and buffers that are new, of another shape, or no longer another module's too."""
        module = part.module
        row: dict[str, Any] = {}
        fresh = [n for n, s in part.parameters.items() if had is None or had.parameters.get(n) != s]
        apart = [] if had is None else sorted(had.tied - part.tied & part.parameters.keys())
        if parameters := {n: [*self._form(p := module.get_parameter(n)), _number(p)] for n in (*fresh, *apart)}:
            row["parameters"] = parameters
        if had is None and (absent := sorted(n for n, p in module._parameters.items() if p is None)):
            row["absent"] = absent
        if buffers := {n: self._buffer(module, n) for n in part.buffers - (had.buffers if had else frozenset())}:
            row["buffers"] = buffers
        return row

    def _buffer(self, module: nn.Module, name: str) -> list[Any]:
        buffer = module.get_buffer(name)
        saved = name not in module._non_persistent_buffers_set
        return [*self._form(buffer), None if saved else buffer.double().flatten().tolist()]

    def _form(self, tensor: Tensor) -> list[Any]:
        """Shape and dtype; null where it goes with the model."""
        return [list(tensor.shape), None if tensor.dtype is self.dtype else str(tensor.dtype).removeprefix("torch.")]

    def _forms(self, path: str, module: nn.Module, name: str) -> list[Any]:
        forms = _computed(module)[name].children()
        kept = [(form, {k: v for k, v in vars(form).items() if k not in _HELD}) for form in forms]
        return [self._made(f"{path}.{name}", type(form), values) for form, values in kept]


def _number(parameter: Tensor) -> float | None:
    """The number that all of it is; None where it holds several."""
    values = parameter.detach().flatten()
    constant = values.numel() > 0 and bool((values == values[0]).all()) and bool(values[0].isfinite())
    return float(values[0]) if constant else None


def _same(a: Any, b: Any) -> bool:
    """Whether two attributes are equal; of what cannot be compared, whether they are one object."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (ValueError, TypeError, RuntimeError):  # arrays give no single answer
        return False
