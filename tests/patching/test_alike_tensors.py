"""Which tensor of one model goes where in another: by name, else by shape and place, else not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from normprobe.checkpoints.opened import opened
from normprobe.errors import CheckpointError
from normprobe.patching.alike.tensors import Side, has_room, match
from normprobe.patching.writing import Writing
from tests.patching.checkpoints import llama, saved

IDS = torch.arange(12).reshape(1, 12)


class Block(nn.Module):
    """A stream with a norm and two branches, whose parts are called as is said."""

    def __init__(self, names: str, width: int = 16, bias: bool = False, both: bool = False) -> None:
        super().__init__()
        self.names, self.both = names.split(), both
        parts = [nn.Embedding(64, 8), nn.LayerNorm(8, bias=bias), nn.Linear(8, width, bias=bias), nn.Linear(width, 8)]
        parts += [nn.Linear(8, width, bias=bias), nn.Linear(width, 8), nn.Linear(8, 64, bias=False)]
        for name, part in zip(self.names, parts, strict=True):
            self.add_module(name, part)

    def forward(self, ids: Tensor) -> Tensor:
        embed, norm, up, down, other, back, head = (self.get_submodule(name) for name in self.names)
        x = embed(ids)
        if self.both:
            y = norm(x)
            x = x + (down(torch.relu(up(y))) + back(torch.relu(other(y))))
        else:
            x = x + down(torch.relu(up(norm(x))))
            x = x + back(torch.relu(other(x)))
        found: Tensor = head(x)
        return found


def side(names: str, **settings: Any) -> Side:
    return Side(Block(names, **settings), IDS, names.split()[0])


def test_the_same_names_and_shapes_are_one_another() -> None:
    found = match(side("a b c d e f g"), side("a b c d e f g"))
    assert all(old == new for new, old in found.items())


@pytest.mark.parametrize("names", ["t u v w x y z", "a e b c d f g", "g f e d c b a"])
def test_other_names_are_told_by_place(names: str) -> None:
    """What is called as another one is in the other model is told apart by its shape."""
    ours, theirs = side("t u v w x y z"), side(names, width=16)
    found = match(ours, theirs)
    parts = dict(zip(names.split(), "tuvwxyz", strict=True))
    assert found == {new: f"{parts[new[0]]}{new[1:]}" for new in theirs.tensors}


def test_another_shape_is_not_the_same_in_spite_of_its_name() -> None:
    with pytest.raises(CheckpointError, match=r"c\.weight \(24, 8\)"):
        match(side("a b c d e f g"), side("a b c d e f g", width=24))


def test_what_is_in_one_place_is_not_guessed() -> None:
    with pytest.raises(CheckpointError, match=r"v\.weight \(16, 8\)"):
        match(side("a b c d e f g", both=True), side("t u v w x y z", both=True))


def test_a_bias_is_zero_where_there_is_none_and_no_other_is_dropped() -> None:
    ours, theirs = side("a b c d e f g"), side("a b c d e f g", bias=True)
    found = match(ours, theirs)
    assert {name for name, old in found.items() if old is None} == {"b.bias", "c.bias", "e.bias"}
    with torch.no_grad():
        for name in ("b", "c", "e"):
            theirs.model.get_parameter(f"{name}.bias").zero_()
    assert match(theirs, ours).keys() == ours.tensors.keys()
    with torch.no_grad():
        theirs.model.get_parameter("e.bias")[3] = 1e-30
    with pytest.raises(CheckpointError, match=r"e\.bias \(16,\)"):
        match(theirs, ours)


def test_there_is_room_where_zeros_alone_have_no_place() -> None:
    ours, theirs = side("a b c d e f g", bias=True), side("t u v w x y z")
    assert has_room(ours, theirs)
    assert not has_room(theirs, ours)
    with torch.no_grad():
        for name in ("b", "c", "e"):
            ours.model.get_parameter(f"{name}.bias").zero_()
    assert has_room(theirs, ours)


def test_names_that_change_places_change_them_in_the_files(tmp_path: Path) -> None:
    names = ("input_layernorm", "post_attention_layernorm")
    folder, part = saved(llama(), tmp_path / "source", "20KB"), tmp_path / "part"
    part.mkdir()
    old = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    with opened(folder) as source:
        model = llama()
        model.load_state_dict(dict(source.tensors), assign=True)
        writing = Writing(part, model, source, None, lambda done: None)
        swapped = dict(zip(names, names[::-1], strict=True))
        origins: dict[str, str | None] = {}
        for name in old:
            before, middle, after = next((name.partition(n) for n in names if n in name), (name, "", ""))
            origins[name] = f"{before}{swapped.get(middle, '')}{after}"
        other = llama()
        other.load_state_dict({name: model.state_dict()[str(held)] for name, held in origins.items()}, assign=True)
        writing.become(other, origins)
        writing.finish()
        writing.close()
    new = {name: t for file in part.glob("*.safetensors") for name, t in load_file(file).items()}
    assert all(torch.equal(new[name], old[str(held)]) for name, held in origins.items())
    assert sum(name != held for name, held in origins.items()) == 4
