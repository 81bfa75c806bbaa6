"""Leaves with a gradient in the place of a model's parameters, so that its own are never touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from normprobe.errors import NormprobeError


class UndifferentiableError(Exception):
    """No gradient can be taken; the text is the reason, as a skip gives it."""


@contextmanager
def differentiated(what: str) -> Iterator[None]:
    """Around a forward that is recorded by autograd, or a backward: what autograd, a kernel or the model itself refuses
    is a reason, as the same forward ran without gradients.

    Raises:
        UndifferentiableError: in the place of what was raised, but for normprobe's own errors.
    """
    try:
        yield
    except NormprobeError:
        raise
    except Exception as error:  # whatever a model raises that takes gradients for training
        kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
        raise UndifferentiableError(f"autograd cannot differentiate the {what}: {kind}{error}") from error


@contextmanager
def stand_ins(model: nn.Module, values: Mapping[Tensor, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
    """Put a fresh leaf with a gradient in the place of every floating point parameter, under all its names.

    The old parameters come back with the state that `untouched` keeps, which must be open around this.

    Args:
        model: whose parameters are replaced.
        values: by parameter, what its stand-in holds; others share the parameter's memory. Of what was made in
            inference mode, which no gradient passes, parameters and buffers, there are copies.

    Yields:
        The leaves by every name that `named_parameters` gives. Integer parameters and parameters of a class
        of their own (quantised ones) stay; of these only those that require a gradient are among the leaves.
    """
    given = values or {}
    leaves: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                fresh = leaves.get(id(parameter))
                if fresh is None:
                    fresh = leaves[id(parameter)] = nn.Parameter(_plain(given.get(parameter, parameter).detach()))
                setattr(module, name, fresh)
        module._buffers.update({name: _plain(held) for name, held in module._buffers.items() if held is not None})
    yield {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
