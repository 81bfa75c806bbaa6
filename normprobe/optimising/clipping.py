"""Adaptive gradient clipping for any torch optimiser."""

from __future__ import annotations

from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import SettingError
from normprobe.inputs import or_made
from normprobe.optimising.numbers import check_number
from normprobe.optimising.units import unit_axes
from normprobe.rewrites.base import Survey

_clipping: WeakKeyDictionary[torch.optim.Optimizer, list[AdaptiveClipping]] = WeakKeyDictionary()


@final
class AdaptiveClipping:
    """Scales gradients before every step so that no unit's is larger than a share of its weights.

    For the weights W of one output unit and their gradient G, G becomes G · λ max(‖W‖, ε) / ‖G‖ where ‖G‖ > λ max(‖W‖,
    ε) (Brock et al. 2021, High-Performance Large-Scale Image Recognition Without Normalization, eq. 3). A unit is what
    one output feature sums over, by the axis that the Anatomy names, also where a weight is stored the other way round;
    for experts each expert's; a vector is a single unit, also where one parameter holds those of all layers. The head
    is left alone with its bias, as in the paper (sec. 4.1).

    The gradients are changed in place, just before `optimizer.step()`, behind the unscaling of a `GradScaler`; where
    the step is given a closure, each time that this has run. A weight that the recorded forward did not use (of an
    expert that no token reached) has the units of those in modules of its class. What is added to the model and to the
    optimiser later is clipped too: the model is then read again, by one forward inside of the step.

    Args:
        optimizer: of any class of torch, with parameters of `model`.
        model: left as it is.
        inputs: of one forward, as for `normprobe.probe`, which tells the units; None where the model's config says
            enough.
        clipping: λ, the largest ratio.
        eps: ε, the least size of a unit's weights.
        head: whether the readout is clipped too.

    Raises:
        SettingError: `model` is no module, `optimizer` none of torch's or of another model, or clipped already;
            `clipping` or `eps` is not positive.
        InputError: no inputs could be made, or the model rejected them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        inputs: Inputs | None = None,
        *,
        clipping: float = 0.01,
        eps: float = 1e-3,
        head: bool = False,
    ) -> None:
        check_model(model)
        check_number("clipping", clipping)
        check_number("eps", eps)
        _check_optimizer(optimizer, model)
        self.clipping, self.eps, self._head = clipping, eps, head
        self._model, self._inputs = model, or_made(model, inputs)
        self._read()
        self._handle: RemovableHandle = optimizer.register_step_pre_hook(self._before)
        self._others = _clipping.setdefault(optimizer, [])
        self._others.append(self)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What is clipped."""
        return tuple(self._axes)

    def remove(self) -> None:
        """Let the optimiser step as it did before."""
        self._handle.remove()
        if self in self._others:
            self._others.remove(self)

    def _read(self) -> None:
        """What the model holds now, and the units of it."""
        self._axes = dict(unit_axes(Survey.of(self._model, self._inputs), self._head))
        self._known: set[Tensor] = set(self._model.parameters())

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Clip now, or where the step is given a closure, whenever that has made the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._all(optimizer)
            return None

        def clipped() -> Any:
            value = closure()
            self._all(optimizer)
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": clipped}
        return (args[0], clipped, *args[2:]), kwargs

    def _all(self, optimizer: torch.optim.Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(parameter not in self._known for parameter in held):
            self._follow(held)
        for parameter in held:
            if parameter in self._axes:
                self.clip(parameter, self._axes[parameter])

    def _follow(self, held: list[Tensor]) -> None:
        """Read the model again where it has parameters now that it had not; what it does not hold is another's."""
        if set(self._model.parameters()).difference(self._known).intersection(held):
            self._read()
        self._known.update(held)

    @torch.no_grad()
    def clip(self, parameter: Tensor, axes: tuple[int, ...]) -> None:
        """Clip the gradient of one parameter, in place; `axes` are those that one unit sums over."""
        assert parameter.grad is not None
        if not parameter.grad.is_sparse:
            parameter.grad.mul_(self._factor(parameter, parameter.grad, axes))
            return
        gradient = parameter.grad.coalesce()  # rows of a table; one that was looked up twice is one unit
        rows, values = gradient.indices()[0], gradient.values()
        held = parameter if 0 in axes else parameter[rows]
        values.mul_(self._factor(held, values, axes))
        parameter.grad = gradient

    def _factor(self, weights: Tensor, gradient: Tensor, axes: tuple[int, ...]) -> Tensor:
        """What the gradient of each unit is multiplied by."""
        most = _norm(weights, axes).clamp_min(self.eps) * self.clipping
        size = _norm(gradient, axes)
        return (most / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_max(1.0).to(gradient.dtype)


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = f"{type(optimizer).__name__}: {optimizer!r:.80}"
        raise SettingError("the optimizer is none of torch's", expected="a torch.optim.Optimizer", found=found)
    own = {id(parameter) for parameter in model.parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if own.isdisjoint(held):
        expected = "one made with parameters of this model, after it was wrapped or moved"
        found = f"{len(held)} tensors that the model does not hold"
        raise SettingError("the optimizer steps no parameter of the model", expected=expected, found=found)
    if any(not own.isdisjoint(map(id, other.parameters)) for other in _clipping.get(optimizer, ())):
        raise SettingError(
            "the optimizer is clipped already",
            expected="one AdaptiveClipping for the parameters of a model",
            found="another one that was not removed",
            hint="call remove() of the other one first",
        )


def _norm(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.square().sum(axes, keepdim=True).sqrt()
