"""From a rewritten model to the weight files of the new checkpoint.

What a rewrite changes goes to the disk at once, and the parameter is mapped from there, so that no more than one place
of the model is held in memory. What nothing changes is copied as it lies. Where a rewrite adds or takes parameters, the
files are laid out anew at the end; where that is foreseen, what was written until then takes no room but its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from normprobe.checkpoints.disk import check_free
from normprobe.checkpoints.dtypes import FLOATS, NAMES
from normprobe.checkpoints.header import ALIGNED
from normprobe.checkpoints.opened import Opened
from normprobe.checkpoints.output import WORTH_IT, Layout, Output, Room, same_layout, sharded
from normprobe.checkpoints.shard import Told
from normprobe.patching.bound import bound, key_of
from normprobe.patching.saved import Part, saved
from normprobe.patching.scratch import Scratch
from normprobe.rewrites import Site

_SCRATCH = ".scratch"
_TORCH = {name: dtype for dtype, name in NAMES.items()}


@final
class Writing:
    """The new weight files of `model`, which was built from the tensors of `source`.

    Args:
        folder: the folder that is being made.
        model: its parameters share memory with the tensors of `source` where nothing was converted.
        source: the checkpoint.
        most: bytes of a file; None keeps the files of the source.
        told: is told of bytes that were written, and read back.
        sites: what will be changed, as far as it is known.
        unsure: whether parameters may come or go, or get other names, besides.

    Raises:
        CheckpointError: the disk has no room for what will be written.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        source: Opened,
        most: int | None,
        told: Told,
        *,
        sites: Sequence[Site] = (),
        unsure: bool = False,
    ) -> None:
        self.folder, self.model, self.source, self.most, self.told = folder, model, source, most, told
        self._stored = bound(model, source.tensors)
        self._prefix = _prefix(self._stored)
        self._scratch = Scratch(folder)
        parts = saved(model, source, self._prefix)
        self._unused = set(source.tensors).difference(*(part.stored for part in parts))
        self._in_file = {name: dtype for part in parts for name, dtype in self._other_dtypes(part).items()}
        self._touched: set[str] = set()
        self._put: set[str] = set()
        layout, anew = self._layout(None), unsure or any(site.added or site.gone for site in sites)
        check_free(folder, f"{folder.parent}: no room for the new folder", self._needs(layout, sites, anew))
        self._output = Output(folder, layout, source, told, reserved=not anew)

    def _needs(self, layout: Layout, sites: Sequence[Site], anew: bool) -> dict[str, int]:
        """Bytes that the disk has to have, beside what converted weights take already."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        rooms = {name: room.nbytes for each in layout.values() for name, room in each.items()}
        added = {name for site in sites for name in site.added} & held.keys()  # until now tied to another
        untied = [name for name in added if name.removeprefix(self._prefix) not in rooms]
        touched = {self._stored[name] for site in sites for name in site.touched if name in self._stored}
        converted = [each.nbytes for name, each in held.items() if name not in self._stored]
        return {
            "the new files": sum(rooms.values()) + sum(held[name].nbytes for name in untied),
            "what changes before they are laid out anew": sum(rooms[name] for name in touched) if anew else 0,
            "the largest weight that is converted": max((each for each in converted if each >= WORTH_IT), default=0),
        }

    def changed(self, site: Site) -> None:
        """Write what was changed at a site, and map it from there once it is written."""
        self._touched.update((*site.touched, *site.added))
        held = dict(self.model.named_parameters(remove_duplicate=False))
        for name in site.touched:
            stored, parameter = self._stored.get(name), held.get(name)
            if parameter is None:
                continue
            if stored is None:
                parameter.data = self._scratch.placed(self._as_in_file(name, parameter.data))
                continue
            self._output.put(stored, parameter.data, partial(_let_go, parameter, parameter.data))
            self._put.add(stored)

    def narrowed(self, sites: Iterable[Site]) -> tuple[str, ...]:
        """The parameters that change there and that files hold in fewer bits than the model."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        names = dict.fromkeys(name for site in sites for name in site.touched if name in self._in_file and name in held)
        return tuple(name for name in names if self._in_file[name].itemsize < held[name].dtype.itemsize)

    def settle(self) -> None:
        """Wait until everything that was changed is written and mapped."""
        self._output.settle()

    def noted(self, sites: Iterable[Site]) -> None:
        """Say of sites that they were changed elsewhere, or once more after `changed`."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        for site in sites:
            self._touched.update((*site.touched, *site.added))
            self._put -= {self._stored[name] for name in site.touched if name in self._stored}
            for name in self._in_file.keys() & site.touched & held.keys():
                held[name].data = self._as_in_file(name, held[name].data)

    def become(self, model: nn.Module, origins: Mapping[str, str | None]) -> None:
        """Write the tensors of another model, which are those of the one before by other names.

        Args:
            model: the other.
            origins: for each of its tensors that of the model before; None for a new one.
        """
        before = self.model.state_dict(keep_vars=True)
        touched = {key_of(before[name]) for name in self._touched & before.keys()}
        known = {new: old for new, old in origins.items() if old is not None}
        self._touched = {new for new, old in known.items() if key_of(before[old]) in touched}
        names = {new: self._name_in_source(before, old) for new, old in known.items()}
        self.source = self.source.renamed({new: there for new, there in names.items() if there is not None})
        self.model, self._prefix, self._unused = model, "", set()

    def _name_in_source(self, state: Mapping[str, Tensor], name: str) -> str | None:
        """What the checkpoint calls a tensor of the model, by this or another of its names; None where it has none."""
        names = [name, *(other for other in state if state[other] is state[name])]
        found = (other.removeprefix(self._prefix) for other in names)
        return next((other for other in found if other in self.source.tensors), None)

    def finish(self) -> dict[str, dict[str, str]]:
        """Everything that is not yet on the disk.

        Returns:
            The sum over every tensor of every file.
        """
        parts = saved(self.model, self.source, self._prefix)
        layout = self._layout({name: tensor for part in parts for name, tensor in part.stored.items()})
        renamed = any(new != old for new, old in self.source.stored.items())
        if renamed or layout != self._output.layout:
            self._anew(layout)
        own = self.model.state_dict(keep_vars=True)
        keys = {key_of(own[name]) for name in self._touched & own.keys()}
        touched = {name for name, tensor in own.items() if key_of(tensor) in keys}
        for part in parts:
            left = part.stored.keys() - self._put
            if left and not (touched.isdisjoint(part.own) and self._lies(part.stored)):
                self._write(part, left)
        hashes = self._output.finish()
        shutil.rmtree(self.folder / _SCRATCH, ignore_errors=True)
        return hashes

    def close(self) -> None:
        """Let go of the files."""
        self._output.close()

    def _write(self, part: Part, names: Set[str]) -> None:
        for name, tensor in part.tensors().items():
            if name in names:
                self._output.put(name, tensor.detach().to(_TORCH[self._room(name, tensor).dtype]))

    def _other_dtypes(self, part: Part) -> dict[str, torch.dtype]:
        """For parameters that files hold in another dtype than the model: which."""
        dtypes = {_TORCH[self._room(name, tensor).dtype] for name, tensor in part.stored.items()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return {} if dtype is None else {name: dtype for name, tensor in part.own.items() if tensor.dtype != dtype}

    def _as_in_file(self, name: str, values: Tensor) -> Tensor:
        """What comes back from a file that holds them in fewer bits: that is what is proven."""
        return values.to(self._in_file[name]).to(values.dtype) if name in self._in_file else values

    def _lies(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the source has these tensors, which nothing changed."""
        had = self.source.tensors
        return all(name in had and had[name].shape == tensor.shape for name, tensor in tensors.items())

    def _room(self, name: str, tensor: Tensor) -> Room:
        """In the dtype that the source has it in, if it is the same tensor in plain numbers."""
        had = self.source.dtypes.get(name)
        if had in FLOATS and tensor.is_floating_point() and self._lies({name: tensor}):
            return Room(had, tuple(tensor.shape), tensor.numel() * _TORCH[had].itemsize)
        return Room.of(tensor)

    def _layout(self, state: Mapping[str, Tensor] | None) -> dict[str, dict[str, Room]]:
        """The files of the source, with what came and without what went; or of at most so many bytes each."""
        layout = same_layout(self.source)
        if state is not None:
            layout = {
                f: {n: r for n, r in rooms.items() if n in state or n in self._unused} for f, rooms in layout.items()
            }
            for name, tensor in state.items():
                layout[_file_for(name, layout)][name] = self._room(name, tensor)
            layout = {file: _in_order(rooms) for file, rooms in layout.items() if rooms} or layout
        if self.most is not None:
            return sharded({n: r for rooms in layout.values() for n, r in rooms.items()}, self.most)
        return layout

    def _anew(self, layout: Mapping[str, Mapping[str, Room]]) -> None:
        """Other files; what was written already stays mapped from where it is until it is in them."""
        scratch = self.folder / _SCRATCH
        scratch.mkdir()
        for file in self._output.layout:
            (self.folder / file).rename(scratch / file)
        self._output.close()
        self._output, self._put = Output(self.folder, layout, self.source, self.told), set()


def _let_go(parameter: nn.Parameter, written: Tensor, mapped: Tensor | None) -> None:
    """Keep the values of a parameter on the disk alone, if they are still those that were written."""
    if mapped is not None and key_of(parameter) == key_of(written):
        parameter.data = mapped


def _prefix(stored: Mapping[str, str]) -> str:
    """What the names of a model have before the `stored` ones, as of a base model that became a part, or ""."""
    found = {name.removesuffix(there) for name, there in stored.items() if name.endswith(there)}
    return found.pop() if len(found) == 1 else ""


def _in_order(rooms: Mapping[str, Room]) -> dict[str, Room]:
    """Tensors of whole multiples of `ALIGNED` first, and wide numbers before narrow ones, where others would push them
    off such places."""

    def late(item: tuple[str, Room]) -> tuple[bool, int]:
        return bool(item[1].nbytes % ALIGNED), -_TORCH[item[1].dtype].itemsize

    place = 0
    for room in rooms.values():
        if room.nbytes and place % ALIGNED:
            return dict(sorted(rooms.items(), key=late))
        place += room.nbytes
    return dict(rooms)


def _file_for(name: str, layout: Mapping[str, Mapping[str, Room]]) -> str:
    """Where a tensor goes: where it is, else to the tensors of the modules around it, else to the last file."""
    for file, rooms in layout.items():
        if name in rooms:
            return file
    around = name
    while "." in around:
        around = around.rpartition(".")[0]
        for file, rooms in layout.items():
            if any(other.startswith(around + ".") for other in rooms):
                return file
    return list(layout)[-1]
