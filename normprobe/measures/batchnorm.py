"""Batch norms: the statistics of this batch against the stored ones, and what the outputs owe to either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.measures.batchnorm_gaps import PASSES, batch_size, gaps
from normprobe.measures.batchnorm_sites import Flags, Seen, batch_norm_inputs, site_of, unseen
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks
from normprobe.norms.running import Running, running
from normprobe.records import Anatomy, Basis, NormSite, Skipped
from normprobe.records.batchnorm import BatchNormMeasure
from normprobe.records.extras import ExtraName


class Kept:
    """The batch norms of a model while its forward runs: what they are given, and what they store before and after."""

    def __init__(self, model: nn.Module, inputs: Inputs, anatomy: Anatomy) -> None:
        self.model, self.inputs = model, inputs
        self.norms = [norm for norm in anatomy.norms if norm.kind == "batchnorm" and norm.executed]
        self.training = model.training
        self.others_learn = self._others_learn()
        self.flags = {norm.path: Flags.of(self._module(norm)) for norm in self.norms if norm.module}
        self.before = {name: buffer.detach().clone() for name, buffer in self._buffers()}
        self.seen: dict[str, Seen] = {}

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, notes what the batch norms are given."""
        with batch_norm_inputs(self.model, self.norms) as seen:
            yield
        self.seen = seen

    def running(self) -> dict[str, Running]:
        """Where each batch norm that was called keeps its statistics; copies of it are run."""
        held = {norm.path: norm for norm in self.norms if norm.path in self.seen}
        return {p: running(self._module(norm), self.seen[p].call, norm.axes) for p, norm in held.items()}

    def record(self, found: Mapping[str, Running]) -> tuple[BatchNormMeasure | None, tuple[Skipped, ...]]:
        """What was seen in one forward; None where nothing was."""
        masks, flags = padding_masks(self.inputs), self.flags
        known = [(norm, self.seen[norm.path]) for norm in self.norms if norm.path in found]
        sites = tuple(site_of(self._module(n), n, s, found[n.path], flags[n.path], masks) for n, s in known)
        skipped = tuple(unseen(self.norms, found))
        if not sites:
            return None, skipped
        measure = BatchNormMeasure(
            basis=Basis(unit="1", dtype=known[0][1].dtype, count=batch_size(self.inputs) or 1),
            sites=sites,
            training=self.training,
            others_learn=self.others_learn,
            processes=_processes(),
            train_eval_gap=None,
            halves_gap=None,
            untouched=self.untouched(),
        )
        return measure, skipped

    def untouched(self) -> bool:
        """Whether all buffers of the model hold what they held at first."""
        return all(_same(self.before[name], buffer) for name, buffer in self._buffers())

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if not self.norms else self.model.named_buffers()

    def _module(self, norm: NormSite) -> nn.Module:
        return self.model.get_submodule("" if norm.path == "." else norm.path)

    def _others_learn(self) -> bool:
        own = {id(p) for norm in self.norms if norm.module for p in self._module(norm).parameters()}
        return any(p.requires_grad for p in self.model.parameters() if id(p) not in own)


class BatchNorm(Extra):
    """Batch norms, in three passes: in eval mode, in train mode, and in train mode with the batch in halves."""

    name: ClassVar[ExtraName] = "batchnorm"

    def measure(self, subject: Subject) -> tuple[BatchNormMeasure | None, tuple[Skipped, ...]]:
        """Every batch norm that is a module; stored statistics and train flags are as before afterwards."""
        kept = Kept(subject.model, subject.inputs, subject.anatomy)
        if not kept.norms:
            return None, (Skipped(what=self.name, why="the model runs no batch norm"),)
        with untouched(subject.model) as keeper, torch.no_grad(), keeper.mode():
            subject.tell(self.name, 0, PASSES)
            with kept.looking():
                output = invoke(subject.model, subject.inputs)
            found = kept.running()
            measure, skipped = kept.record(found)
            train_eval, halves, unseen = gaps(subject, found, floats(output))
        if measure is None:
            return None, skipped
        more = {"train_eval_gap": train_eval, "halves_gap": halves, "untouched": kept.untouched()}
        return measure.model_copy(update=more), (*skipped, *unseen)


def _same(before: Tensor, after: Tensor) -> bool:
    """Whether two buffers hold the same numbers, NaN in the same places."""
    return before.shape == after.shape and bool(((before == after) | ((before != before) & (after != after))).all())


def _processes() -> int:
    """How many processes compute together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
