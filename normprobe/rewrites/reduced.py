"""Models of which torch averages gradients over processes already."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from normprobe.errors import RewriteError
from normprobe.rewrites.base import Rewrite, Sites


def check_reduced(model: nn.Module, steps: Iterable[tuple[Rewrite, Sites]]) -> None:
    """Refuse to exchange parameters inside a `DistributedDataParallel`.

    It lists the parameters once, when it is made: the gradients of one that is added later are never averaged, so that
    the processes drift apart, and it waits for those of one that is gone.

    Raises:
        RewriteError: a rewrite would add parameters or drop some there.
    """
    inside = [path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    for rewrite, found in steps if inside else ():
        names = [name for site in found.sites for name in (*site.added, *site.gone)]
        name = next((name for name in names if any(_within(name, path) for path in inside)), None)
        if name is not None:
            raise RewriteError(
                f"{rewrite.name} would change which parameters there are inside {inside[0] or 'the model'}",
                expected="parameters that stay: those at the wrapping are the ones whose gradients are averaged",
                found=f"DistributedDataParallel around {name}",
                hint="rewrite the inner model (.module) on every process alike, then wrap it anew",
            )


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")
