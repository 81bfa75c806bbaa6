"""What goes wrong with the statistics of batch norms (7xx)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from normprobe.records import Anatomy
from tests.faults.edits import module_at, norm_at, parameter, replace, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault
from tests.faults.operators.gains import look_trained

FORWARD = Conditions(level="forward")
LOST = ("NP504",)  # the outputs are not finite either


def kept(anatomy: Anatomy) -> list[Site]:
    """Batch norms that are modules and run."""
    return [Site(n.path) for n in anatomy.norms if n.kind == "batchnorm" and n.module and n.executed and not n.frozen]


def statistics(model: nn.Module, site: Site) -> tuple[Tensor, Tensor, Tensor | None]:
    """Means, variances and the count of batches: the buffers of a batch norm in torch's order."""
    held = list(module_at(model, site.path).buffers())
    if len(held) < 2 or not all(b.is_floating_point() and b.dim() == 1 for b in held[:2]):
        raise NotHereError("it keeps no statistics of its own")
    return held[0], held[1], held[2] if len(held) > 2 else None


def settled(model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
    """Statistics that have seen these inputs often, and a count of ten thousand batches."""
    model.train()
    with torch.no_grad():
        for _ in range(60):
            invoke(model, inputs)
        for count in (statistics(model, site)[2] for site in kept(anatomy)):
            if count is not None:
                count.fill_(10_000)
    model.eval()


def invoke(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def trained(model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
    look_trained(model, anatomy, inputs)
    settled(model, anatomy, inputs)


SETTLED = Conditions(level="forward", prepare=settled)
BOTH_MODES = Conditions(level="forward", measures=("batchnorm",), prepare=settled)
FITTED = Conditions(level="forward", prepare=trained)


@fault("statistics reset to 0 and 1 after many batches", "NP705", "warning", kept, SETTLED)
def reset(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    mean, variance, count = statistics(model, site)
    if count is None:
        raise NotHereError("it counts no batches")
    with writing():
        mean.zero_()
        variance.fill_(1.0)


@fault("statistics lost in loading a trained model", "NP705", "warning", kept, FITTED)
def lost(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    mean, variance, count = statistics(model, site)
    with writing():
        mean.zero_()
        variance.fill_(1.0)
        if count is not None:
            count.zero_()


@fault("a stored mean of NaN", "NP705", "error", kept, FORWARD, LOST)
def nan_mean(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        statistics(model, site)[0][0] = float("nan")


@fault("a stored variance below 0", "NP705", "error", kept, FORWARD, LOST)
def negative_variance(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        statistics(model, site)[1][-1] = -0.5


@fault("stored variances of 0", "NP705", "error", kept, FORWARD, LOST)
def zero_variance(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        statistics(model, site)[1].zero_()


@fault("statistics of other data", "NP705", "note", kept, SETTLED)
def of_other_data(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    mean, variance, _ = statistics(model, site)
    with writing():
        mean.add_(10 * variance.sqrt())
        variance.mul_(20)


@fault("statistics of three batches", "NP705", "note", kept, FORWARD)
def of_few_batches(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    mean, variance, count = statistics(model, site)
    if count is None:
        raise NotHereError("it counts no batches")
    with writing():
        count.fill_(3)
        mean.add_(0.01)
        variance.mul_(1.01)


@fault(
    "stored variances ten times too large in all norms", "NP701", "note", lambda a: kept(a)[:1], BOTH_MODES, ("NP705",)
)
def other_scale(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        for one in kept(anatomy):
            statistics(model, one)[1].mul_(100)


@fault("one norm left in eval mode while training", "NP706", "warning", kept, FORWARD)
def flagged(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    model.train()
    module_at(model, site.path).eval()


def gained(anatomy: Anatomy) -> list[Site]:
    return [site for site in kept(anatomy) if norm_at(anatomy, site.path).weight is not None]


@fault("gain and offset frozen, statistics not", "NP706", "warning", gained, FORWARD)
def held(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    for path in (norm.weight, norm.bias):
        if path is not None:
            parameter(model, path).requires_grad_(False)


def one_sample(inputs: Any) -> Any:
    """The first sample of every tensor, of pictures a corner."""
    if not any(isinstance(t, Tensor) and t.dim() == 4 for t in pytree.tree_leaves(inputs)):
        raise NotHereError("no pictures")
    return pytree.tree_map_only(Tensor, lambda t: t[:1, ..., :3, :3] if t.dim() == 4 else t[:1], inputs)


@fault(
    "a batch of one small picture in train mode", "NP702", "note", kept, Conditions(level="forward", inputs=one_sample)
)
def small_batch(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    model.train()


@contextmanager
def two_processes() -> Iterator[None]:
    """This process as the first of two that train together; nothing is sent to the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def synchronised(model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
    """Every batch norm shares its statistics, as far as torch can make it."""
    for site in kept(anatomy):
        own = module_at(model, site.path)
        made = nn.SyncBatchNorm.convert_sync_batchnorm(own)
        if made is not own:
            made.__dict__["own"] = own
            replace(model, site.path, made)


@fault(
    "one norm that does not share its statistics with the other processes",
    "NP704",
    "warning",
    kept,
    Conditions(level="forward", prepare=synchronised, around=two_processes),
)
def alone(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    shared = module_at(model, site.path)
    if not isinstance(shared, nn.SyncBatchNorm):
        raise NotHereError("torch does not know it as a batch norm")
    replace(model, site.path, shared.__dict__["own"])


ALL: tuple[Fault, ...] = (
    reset,
    lost,
    nan_mean,
    negative_variance,
    zero_variance,
    of_other_data,
    of_few_batches,
    other_scale,
    flagged,
    held,
    small_batch,
    alone,
)
