"""How far bounded stand-ins for norms (DyT, Zhu et al. 2025, and what bends in its way) are driven into their bend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.composites import without_modes
from normprobe.capture.invoke import Inputs
from normprobe.capture.parts import Parts
from normprobe.capture.watch import Handler, Watched
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.elementwise import Elementwise
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks
from normprobe.records import Anatomy, Basis, BoundedNorm, NormSite, OpSite, Skipped

_AT_LIMIT = 0.99  # the slope of tanh is 0.02 there


class Bounded:
    """The norms of kind `dyt` that are modules, while a forward runs."""

    def __init__(self, model: nn.Module, inputs: Inputs, anatomy: Anatomy, seed: int) -> None:
        self.model, self.seed = model, seed
        self.norms = [norm for norm in anatomy.norms if norm.kind == "dyt" and norm.executed and norm.bend is None]
        self.padding = padding_masks(inputs) if self.norms else ()
        self._seen: dict[str, Elementwise] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, samples what those that are modules are given and what they make of it."""
        held = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters(remove_duplicate=False))}
        tensors = Parts(held)
        with ExitStack() as stack:
            for norm in self.norms:
                if norm.module and norm.affine != "other":
                    module = self.model.get_submodule("" if norm.path == "." else norm.path)
                    self._seen[norm.path] = Elementwise.of(norm, tensors)
                    stack.enter_context(wrapped_forwards(module, self._around(norm)))
            yield

    def record(self) -> tuple[tuple[BoundedNorm, ...], tuple[Skipped, ...]]:
        """What was seen, and the norms of which nothing was, with the reason."""
        known = [norm for norm in self.norms if norm.path in self._seen and self._seen[norm.path].count]
        found = tuple(_measured(norm.path, self._seen[norm.path]) for norm in known)
        skipped = tuple(
            Skipped(what=f"inputs of {norm.path}", why=self._why(norm)) for norm in self.norms if norm not in known
        )
        return found, skipped

    def _around(self, norm: NormSite) -> Callable[..., Any]:
        def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            given = floats((args, kwargs)) if path == "." else []
            x = given[0].detach().clone() if given else None  # the forward may write into it
            output = forward(*args, **kwargs)
            y = next((t for t in floats(output) if x is not None and t.shape == x.shape), None)
            if x is not None and y is not None:
                without_modes(self._seen[norm.path].add, x, y, self.seed, self.padding)
            return output

        return around

    def _why(self, norm: NormSite) -> str:
        if not norm.module:
            return "it is no module, and what bends there is no bounded function by itself"
        if norm.affine == "other":
            return "its gain is of an unknown form"
        return "all of its gain is 0" if self._seen[norm.path].total else "no output has the shape of its input"


class BendHandler(Handler):
    """What the non-linearity of a bounded map is given, and what it makes of it, in units of its own limits: those of
    `hardtanh(x, -3, 3)` are 3."""

    def __init__(self, seed: int, padding: Sequence[Tensor]) -> None:
        self._seed, self._padding = seed, padding
        self._seen = Elementwise(gain=None, offset=None, channels_first=False)
        self._x: Tensor | None = None
        self._limit = 1.0

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Keep what it is given: it may write over it."""
        self._x = arguments["self"].detach().clone()

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the sample."""
        x, self._x = self._x, None
        if x is not None:
            low, high = float(arguments.get("min_val", -1.0)), float(arguments.get("max_val", 1.0))
            self._limit = (high - low) / 2
            self._seen.add(x, (output - (high + low) / 2) / self._limit, self._seed, self._padding)

    def record(self, path: str) -> BoundedNorm | None:
        """What was seen of the norm at `path`; None where nothing was."""
        return _measured(path, self._seen, self._limit) if self._seen.count else None


def bend_handlers(anatomy: Anatomy, seed: int, padding: Sequence[Tensor]) -> dict[str, tuple[OpSite, BendHandler]]:
    """A handler for every bounded map that is written out, by the path of the norm."""
    norms = [(norm.path, norm.bend) for norm in anatomy.norms if norm.bend is not None]
    return {path: (site, BendHandler(seed, padding)) for path, site in norms}


def read_bends(
    handlers: Mapping[str, tuple[OpSite, BendHandler]], watched: Watched
) -> tuple[tuple[BoundedNorm, ...], list[Skipped]]:
    """What the handlers saw, and what they did not with the reason."""
    found = {path: handler.record(path) for path, (_, handler) in handlers.items()}
    skipped = [
        Skipped(what=f"inputs of {path}", why=watched.reason(handlers[path][0]) or "nothing but padding was seen")
        for path, one in found.items()
        if one is None
    ]
    return tuple(one for one in found.values() if one is not None), skipped


def _measured(path: str, seen: Elementwise, limit: float = 1.0) -> BoundedNorm:
    x, z = torch.cat(seen.inputs), torch.cat(seen.outputs)
    return BoundedNorm(
        path=path,
        limit=limit,
        basis=Basis(unit="1", dtype=seen.dtype, count=len(x), exact=len(x) == seen.total),
        input_rms=float(x.square().mean().sqrt()),
        output_rms=float(z.square().mean().sqrt()),
        saturated=float((z.abs() > _AT_LIMIT).double().mean()),
    )
