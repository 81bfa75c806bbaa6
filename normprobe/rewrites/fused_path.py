"""Turn torch's fused encoder path off where it would pass rewritten modules by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normprobe.rewrites.base import Site

_ASKED = "activation_relu_or_gelu"  # what torch asks of a layer before it fuses; the activation itself is elsewhere


def fused_around(model: nn.Module, sites: tuple[Site, ...]) -> tuple[str, ...]:
    """Paths of the encoder layers around changed modules that torch may run as one fused operation.

    In eval mode without gradients `nn.TransformerEncoderLayer` hands the weights of its modules to one kernel and calls
    none of them, so that a changed class, hook or child has no effect there.
    """
    changed = [site.path for site in sites if site.forward]
    return tuple(path for path, layer in _fused(model) if any(_inside(other, path) for other in changed))


def keep_plain(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Let the encoder layers at `paths` call their modules, always."""
    for path in paths:
        layer = model.get_submodule(path)
        layer.__dict__[_ASKED] = 0


def _fused(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module.__dict__.get(_ASKED):
            yield path, module


def _inside(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(around + ".")
