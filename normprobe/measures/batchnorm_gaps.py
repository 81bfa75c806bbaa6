"""What outputs owe to the statistics of the batch: train against eval mode, half the batch against the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe import stats
from normprobe.capture.invoke import Inputs, invoke
from normprobe.measures.extra import Subject
from normprobe.measures.finite import floats
from normprobe.norms.running import Running
from normprobe.records import Skipped

PASSES = 3
_TRAIN, _HALVES = "batchnorm, train against eval mode", "batchnorm, half the batch"


def gaps(
    subject: Subject, found: Mapping[str, Running], plain: list[Tensor]
) -> tuple[float | None, float | None, tuple[Skipped, ...]]:
    """Train against eval mode, halves of the batch against the whole, and what of these could not be run.

    Args:
        subject: its model is in eval mode, under a guard that puts back what train mode changes.
        found: the statistics of the batch norms by path.
        plain: the floating outputs in eval mode.
    """
    with _training(subject.model, found):
        subject.tell("batchnorm", 1, PASSES)
        whole = _outputs(subject.model, [subject.inputs])
        if isinstance(whole, str):
            return None, None, (Skipped(what=_TRAIN, why=whole), Skipped(what=_HALVES, why=whole))
        gap = stats.relative_error(zip(whole[0], plain, strict=True))
        halves = _split(subject.inputs)
        if isinstance(halves, str):
            return gap, None, (Skipped(what=_HALVES, why=halves),)
        subject.tell("batchnorm", 2, PASSES)
        parts = _outputs(subject.model, halves)
    if isinstance(parts, str):
        return gap, None, (Skipped(what=_HALVES, why=parts),)
    rows = [(torch.cat(pair), full) for full, *pair in zip(whole[0], *parts, strict=False) if _joins(pair, full)]
    if not rows:
        return gap, None, (Skipped(what=_HALVES, why="no output has a row for each sample"),)
    return gap, stats.relative_error(rows), ()


def batch_size(inputs: Inputs) -> int | None:
    """The size of the first axis where all input tensors agree on it."""
    sizes = {t.shape[0] if t.ndim else None for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def _outputs(model: nn.Module, batches: Iterable[Inputs]) -> list[list[Tensor]] | str:
    """The floating outputs for each batch, or why the model refused: most often one value a channel is too few."""
    try:
        return [floats(invoke(model, batch)) for batch in batches]
    except Exception as error:  # the user's forward may raise anything in a mode and size that it was not given for
        return f"the model does not run so: {type(error).__name__}: {error}"


def _split(inputs: Inputs) -> list[Inputs] | str:
    size = batch_size(inputs)
    if size is None:
        return "the input tensors have no axis of samples in common"
    if size < 2:
        return "the batch has one sample"
    parts = slice(0, size // 2), slice(size // 2, None)
    return [pytree.tree_map_only(Tensor, lambda t, part=part: t[part], inputs) for part in parts]


def _joins(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether the parts put together have the shape of the whole."""
    rows = [part.shape[0] for part in parts if part.ndim and part.shape[1:] == whole.shape[1:]]
    return whole.ndim > 0 and len(rows) == len(parts) and sum(rows) == whole.shape[0]


@contextmanager
def _training(model: nn.Module, found: Mapping[str, Running]) -> Iterator[None]:
    """Batch norms in train mode: their modules and those that hold the statistics, nothing else inside them."""
    names = set()
    for path, kept in found.items():
        owner = (kept.mean or kept.variance or "").rpartition(".")[0]
        own = "" if path == "." else path
        names |= {own, f"{own}.{owner}".strip(".")} if owner else {own}
    for name in names:
        model.get_submodule(name).training = True
    try:
        yield
    finally:
        for name in names:
            model.get_submodule(name).training = False
