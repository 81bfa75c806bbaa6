"""The tools of the fault operators do what they say to the model, and no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.records import NormSite, OpSite
from tests.faults import edits, written
from tests.faults.architectures import by_hand, llama, pictures
from tests.faults.fault import NotHereError

X = torch.linspace(-2.0, 3.0, 40, dtype=torch.float64).view(2, 20)


def test_a_written_norm_is_torchs_own_where_its_form_is() -> None:
    for centred, own in ((True, nn.LayerNorm(20, eps=1e-3)), (False, nn.RMSNorm(20, eps=1e-3))):
        own = own.double()
        made = written.Written(written.Form(centred, 1e-3), torch.ones(20, dtype=torch.float64), None)
        assert torch.allclose(made(X.float()), own(X).float(), rtol=1e-5)


@pytest.mark.parametrize(("place", "root"), [("outside", 2.0 + 0.5), ("clamp", 2.0), ("inside", 4.5**0.5)])
def test_the_place_of_eps(place: Any, root: float) -> None:
    """Of a constant 2 the root mean square is 2."""
    made = written.Written(written.Form(False, 0.5, place), None, None)
    assert float(made(torch.full((1, 8), 2.0))[0, 0]) == pytest.approx(2.0 / root)
    clamped = written.Written(written.Form(False, 4.0, "clamp"), None, None)
    assert float(clamped(torch.full((1, 8), 2.0))[0, 0]) == pytest.approx(0.5)


def test_the_precision_of_a_written_norm() -> None:
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert float(written.Written(written.Form(False, 0.0), None, None)(x)[0, 0]) == 1.0
    assert (
        float(written.Written(written.Form(False, 0.0, wide=False), None, None)(x)[0, 0]) == 0.0
    )  # of infinite squares


def test_a_form_is_read_of_norms_along_the_last_axis_alone() -> None:
    norm = NormSite(path="n", kind="rmsnorm", subtracts_mean=False, affine="one_plus_weight", eps=1e-6, axes=(-1,))
    assert written.form_of(norm) == written.Form(False, 1e-6, one_plus=True)
    with pytest.raises(NotHereError, match="no norm along the last axis"):
        written.form_of(norm.model_copy(update={"axes": (1,)}))


def test_an_overlay_keeps_the_module_and_its_copies_work() -> None:
    layer = nn.Linear(4, 4)
    below = layer(torch.ones(1, 4))
    weight = layer.weight
    edits.behind(layer, lambda y: 3 * y)
    assert layer.weight is weight
    assert type(layer).__name__ == "Linear"
    assert torch.equal(copy.deepcopy(layer)(torch.ones(1, 4)), 3 * below)
    edits.before(layer, lambda x: 0 * x)
    assert torch.equal(layer(torch.ones(1, 4)), 3 * layer.bias[None])


def test_what_is_uncalled_stays_built() -> None:
    model, inputs = by_hand()
    path = normprobe.probe(model, inputs, level="structure").anatomy.streams[0].final_norm
    assert path is not None
    held = model.get_submodule(path)
    edits.uncalled(model, path)
    report = normprobe.probe(model, inputs, level="structure")
    assert model.get_submodule(path) is held
    assert report.anatomy.norm(path).executed is False  # type: ignore[union-attr]
    assert {"NP201", "NP208"} <= {f.code for f in report.findings}


@pytest.mark.parametrize("build", [by_hand, llama, pictures])
def test_an_operation_is_changed_where_the_anatomy_says(build: Any) -> None:
    """Twice the trunk at one add: the Anatomy of the changed model says so of that add alone."""
    model, inputs = build()
    branches = normprobe.probe(model, inputs, level="structure").anatomy.streams[0].branches
    branch = branches[2]

    def doubled(run: Any, *operands: Any, **more: Any) -> Any:
        changed = list(operands)
        changed[branch.trunk] = 2 * changed[branch.trunk]
        return run(*changed, **more)

    edits.at(model, branch.add, doubled)
    after = normprobe.probe(model, inputs, level="structure").anatomy.streams[0].branches
    assert [b.skip_scale for b in after] == [2.0 if i == 2 else 1.0 for i in range(len(branches))]


def test_two_operations_of_one_module_are_changed() -> None:
    model, inputs = llama()
    branches = normprobe.probe(model, inputs, level="structure").anatomy.streams[0].branches
    assert branches[2].add.path == branches[3].add.path
    for branch in branches[2:4]:
        edits.at(model, branch.add, lambda run, trunk, write: run(3 * trunk + 1, write))
    after = normprobe.probe(model, inputs, level="structure").anatomy.streams[0].branches
    assert [b.skip_scale for b in after] == [1.0, 1.0, 3.0, 3.0, 1.0, 1.0]


def test_a_function_that_is_recorded_whole_can_be_changed() -> None:
    model, inputs = llama()
    site = normprobe.probe(model, inputs, level="structure").anatomy.attention[1]
    assert "." not in site.site.op
    edits.at(model, site.site, lambda run, *args, **kwargs: run(*args, **kwargs | {"scale": 0.5}))
    scales = [one.scale for one in normprobe.probe(model, inputs, level="structure").anatomy.attention]
    assert scales == pytest.approx([8**-0.5, 0.5, 8**-0.5])


def test_operations_of_modules_inside_are_not_counted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.inner(x) - 1)

    model = Two()
    seen: list[float] = []

    def keep(run: Any, x: torch.Tensor) -> Any:
        seen.append(float(x))
        return run(x)

    edits.at(model, OpSite(path=".", op="aten.relu.default"), keep)
    assert float(model(torch.tensor(3.0))) == 2.0
    assert seen == [2.0]
