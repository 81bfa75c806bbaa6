"""Adaptive gradient clipping for any torch optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normprobe.anatomy.weights.added import added_parameters
from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import SettingError
from normprobe.inputs import or_made
from normprobe.records.parts import cuts_of
from normprobe.rewrites.base import Survey


@final
class AdaptiveClipping:
    """Scales gradients before every step so that no unit's is larger than a share of its weights.

    For the weights W of one output unit and their gradient G, G becomes G · λ max(‖W‖, ε) / ‖G‖ where ‖G‖ > λ max(‖W‖,
    ε) (Brock et al. 2021, High-Performance Large-Scale Image Recognition Without Normalization, eq. 3). A unit is what
    one output feature sums over, by the axis that the Anatomy names, also where a weight is stored the other way round;
    for experts each expert's; a vector is a single unit, also where one parameter holds those of all layers. The head
    is left alone, as in the paper (sec. 4.1).

    The gradients are changed in place, just before `optimizer.step()`, behind the unscaling of a `GradScaler`.

    Args:
        optimizer: of any class of torch, with parameters of `model`.
        model: left as it is.
        inputs: of one forward, as for `normprobe.probe`, which tells the units; None where the model's config says
            enough.
        clipping: λ, the largest ratio.
        eps: ε, the least size of a unit's weights.
        head: whether the readout is clipped too.

    Raises:
        SettingError: `model` is no module, `optimizer` none of torch's or of another model, `clipping` or `eps` is not
            positive.
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
        _check_optimizer(optimizer, model)
        for name, value in (("clipping", clipping), ("eps", eps)):
            if not (value > 0 and math.isfinite(value)):
                raise SettingError(f"{name} cannot be used", expected="a finite number above 0", found=repr(value))
        self.clipping, self.eps = clipping, eps
        self._axes = dict(_axes(Survey.of(model, or_made(model, inputs)), head))
        self._handle: RemovableHandle = optimizer.register_step_pre_hook(self._before)

    def remove(self) -> None:
        """Let the optimiser step as it did before."""
        self._handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._axes:
                    self.clip(parameter, self._axes[parameter])

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


def _norm(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.square().sum(axes, keepdim=True).sqrt()


def _axes(survey: Survey, head: bool) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The axes of a unit for every parameter that is clipped."""
    sites = {site.parameter: site for site in survey.anatomy.weights}
    several = _stacks(survey)
    for name, parameter in survey.model.named_parameters():
        site = sites.get(name)
        if site is not None and "head" in site.roles and not head:
            continue
        kept = several.get(name, frozenset())
        if site is not None and parameter.dim() > 1:
            kept = frozenset({site.output_axis % parameter.dim()} | ({0} if site.kind == "experts" else set()))
            kept = frozenset({0}) if site.kind == "embedding" else kept  # a row of a table is a unit
        yield parameter, tuple(axis for axis in range(parameter.dim()) if axis not in kept)


def _stacks(survey: Survey) -> dict[str, frozenset[int]]:
    """The axes along which parameters hold the gains, offsets or biases of several layers."""
    names = {name for name, _ in survey.model.named_parameters()}
    found = dict(added_parameters(survey.trace))
    for norm in survey.anatomy.norms:
        for part in (norm.weight, norm.bias):
            name, cuts = cuts_of(part or "", names)
            layers = frozenset(axis for axis, cut in enumerate(cuts) if isinstance(cut, int))
            found[name] = found.get(name, layers) & layers
    return found
