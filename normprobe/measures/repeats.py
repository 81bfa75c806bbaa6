"""What the second of two norms in a row does to what the first one made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.composites import without_modes
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.finite import floats
from normprobe.records import Anatomy, Basis, NormSite, RepeatedNorm


@dataclass
class _Sums:
    """Sums of squares of what one norm was given, and of what it changed, over all of its calls."""

    dtype: str
    given: float = 0.0
    changed: float = 0.0
    count: int = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            self.given += float(x.detach().float().square().sum())
            self.changed += float((y.detach().float() - x.detach().float()).square().sum())
        self.count += x.numel()


class Repeats:
    """The norms that are modules and stand right behind another norm, while a forward runs."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self.model = model
        self.norms = [norm for norm in anatomy.norms if norm.follows is not None and norm.module]
        self._seen: dict[str, _Sums] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, compares what these norms are given with what they make of it."""
        with ExitStack() as stack:
            for norm in self.norms:
                module = self.model.get_submodule("" if norm.path == "." else norm.path)
                stack.enter_context(wrapped_forwards(module, self._around(norm)))
            yield

    def record(self) -> tuple[RepeatedNorm, ...]:
        """What was seen in one forward."""
        known = [(norm, self._seen[norm.path]) for norm in self.norms if norm.path in self._seen]
        return tuple(
            RepeatedNorm(
                path=norm.path,
                follows=norm.follows or "",
                change=(sums.changed / sums.given) ** 0.5 if sums.given else float("nan"),
                basis=Basis(unit="ratio", dtype=sums.dtype, count=sums.count),
            )
            for norm, sums in known
        )

    def _around(self, norm: NormSite) -> Callable[..., Any]:
        calls = 0

        def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal calls
            given = floats((args, kwargs)) if path == "." else []
            calls += bool(given)
            second = norm.follows != norm.path or calls % 2 == 0  # called twice in a row, the first is no repetition
            x = given[0].detach().clone() if given and second else None  # the forward may write into it
            output = forward(*args, **kwargs)
            y = next((t for t in floats(output) if x is not None and t.shape == x.shape), None)
            if x is not None and y is not None:
                sums = self._seen.setdefault(norm.path, _Sums(str(x.dtype).removeprefix("torch.")))
                without_modes(sums.add, x, y)
            return output

        return around
