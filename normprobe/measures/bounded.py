"""How far bounded stand-ins for norms are driven into their bend, while a forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from normprobe.capture.composites import without_modes
from normprobe.capture.invoke import Inputs
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.elementwise import Elementwise
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks
from normprobe.records import Anatomy, Basis, BoundedNorm, NormSite, Skipped

_AT_LIMIT = 0.99  # the slope of tanh is 0.02 there


class Bounded:
    """The norms of kind `dyt` of a model; DyT (Zhu et al. 2025) and what bends in its way."""

    def __init__(self, model: nn.Module, inputs: Inputs, anatomy: Anatomy, seed: int) -> None:
        self.model, self.seed = model, seed
        self.norms = [norm for norm in anatomy.norms if norm.kind == "dyt" and norm.executed]
        self.padding = padding_masks(inputs) if self.norms else ()
        self._seen: dict[str, Elementwise] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, samples what those that are modules are given and what they make of it."""
        tensors = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters(remove_duplicate=False))}
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
        found = tuple(_measured(norm, self._seen[norm.path]) for norm in known)
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
            return "it is no module"
        if norm.affine == "other":
            return "its gain is of an unknown form"
        return "all of its gain is 0" if self._seen[norm.path].total else "no output has the shape of its input"


def _measured(norm: NormSite, seen: Elementwise) -> BoundedNorm:
    x, z = torch.cat(seen.inputs), torch.cat(seen.outputs)
    return BoundedNorm(
        path=norm.path,
        basis=Basis(unit="1", dtype=seen.dtype, count=len(x), exact=len(x) == seen.total),
        input_rms=float(x.square().mean().sqrt()),
        output_rms=float(z.square().mean().sqrt()),
        saturated=float((z.abs() > _AT_LIMIT).double().mean()),
    )
