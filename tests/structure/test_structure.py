"""What rewrites change is written down and put into a fresh model, by this package and by a file that stands alone."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import FunnelBaseModel, FunnelModel, GPT2Config, GPT2LMHeadModel

from benchmarks.rewriting import SETTINGS
from normprobe.capture.invoke import invoke
from normprobe.capture.outputs import named_tensors
from normprobe.errors import CheckpointError, NormprobeError
from normprobe.measures.began import began
from normprobe.rewrites import AddQKNorm, Plan, Rewrite, ScaleResidual, Survey, make_plan
from normprobe.rewrites.at_add import Link, Linked
from normprobe.rewrites.norms.upcast import Upcast
from normprobe.rewrites.plan import plan_on
from normprobe.rewrites.swap import Layer, lay
from normprobe.structure.bundle import bundle
from normprobe.structure.kinds import KINDS, LAYERS, OWN
from normprobe.structure.modelling import auto_map, text_of
from normprobe.structure.restore import decoded, fitted, restore
from normprobe.structure.snapshot import Structure
from normprobe.structure.values import Encoder
from tests.faults.architectures import BUILDS

MODELS = ("gpt2", "cohere", "pictures", "free", "bert")


def described(rewrite: Rewrite) -> str:
    return str(rewrite.to_dict())


def applied(survey: Survey, rewrite: Rewrite) -> Plan | None:
    """The plan, applied; None where it does not apply."""
    try:
        return plan_on(survey, [rewrite]).apply()
    except NormprobeError:
        return None


def outputs(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tensor for _, tensor in named_tensors(invoke(model, inputs))]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The file that stands alone, with everything that a rewrite puts into a model."""
    path = tmp_path_factory.mktemp("alone") / "standing_alone.py"
    path.write_text(bundle([*OWN, restore]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("standing_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["standing_alone"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["standing_alone"]


@pytest.mark.parametrize("name", MODELS)
def test_every_rewrite_is_written_down_and_restored(name: str, alone: ModuleType) -> None:
    built, inputs = BUILDS[name]()
    built = built.eval()
    kinds = {kind: getattr(alone, kind, value) for kind, value in KINDS.items()}
    count = 0
    model, fresh, survey = built, copy.deepcopy(built), Survey.of(built, inputs)
    for rewrite in SETTINGS:
        before = Structure.of(model)
        plan = applied(survey, rewrite)
        if plan is None:
            continue
        count += 1
        changes = json.loads(json.dumps(before.changes(model)))
        for by, known in ((restore, KINDS), (alone.restore, kinds)):
            twin = copy.deepcopy(fresh)
            by(twin, changes, known)
            twin.load_state_dict(model.state_dict(), strict=True)
            assert equal(outputs(twin, inputs), outputs(model, inputs)), described(rewrite)
            assert Structure.of(twin).parts.keys() == Structure.of(model).parts.keys(), described(rewrite)
        plan.undo()
        assert before.changes(model) == [], described(rewrite)
    assert count >= 3


def test_what_is_restored_in_inference_mode_can_be_trained(alone: ModuleType) -> None:
    model, inputs = BUILDS["gpt2"]()
    before, plain = Structure.of(model.eval()), copy.deepcopy(model)
    make_plan(model, [AddQKNorm(), ScaleResidual()], inputs).apply()
    changes = before.changes(model)
    for by, known in ((restore, KINDS), (alone.restore, {kind: getattr(alone, kind, KINDS[kind]) for kind in KINDS})):
        twin = copy.deepcopy(plain)
        with torch.inference_mode():
            by(twin, changes, known)
        assert twin.state_dict().keys() == model.state_dict().keys()
        assert [name for name, held in twin.named_parameters() if held.is_inference()] == []


def test_the_file_imports_nothing_of_this_package(tmp_path: Path) -> None:
    path = tmp_path / "standing_alone.py"
    path.write_text(bundle([*OWN, restore]), encoding="utf-8")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import standing_alone; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [name for name in run.stdout.split() if name.partition(".")[0] == "normprobe"] == []


def test_every_layer_has_a_name_in_changes() -> None:
    def below(kind: type[Any]) -> Iterator[type[Any]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    laid = [k for k in below(Layer) if k.__module__.startswith("normprobe.") and "NOTE" in k.__dict__]
    made = [k for k in laid if not issubclass(k, nn.Module)]
    assert {kind.__name__ for kind in made} == {kind.__name__ for kind in LAYERS}


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two things are called HeadNorm"):
        bundle([_Named("tests.rewrites.cases", "HeadNorm"), KINDS["HeadNorm"]])


class _Named:
    def __init__(self, module: str, name: str) -> None:
        self.__module__, self.__name__ = module, name


def test_links_that_were_one_are_one_again() -> None:
    link = Link(alpha=2.0, norm="n")
    encoder = Encoder()
    rows = [encoder.encoded((link, 1), "a"), encoder.encoded(link, "b")]
    same: dict[int, Any] = {}
    (first, _), second = (decoded(row, KINDS, same) for row in json.loads(json.dumps(rows)))
    assert first is second
    assert first == link


@pytest.mark.parametrize("value", [object(), torch.zeros(2), float("nan"), {1, 2}])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"h\.0\.eps cannot be written down"):
        Encoder().encoded(value, "h.0.eps")


class Strange(Layer):
    """A layer that nobody knows."""

    NOTE = "strange"

    def forward(self, *args: Any) -> Any:
        return super().forward(*args)


def test_an_unknown_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = Structure.of(model)
    lay(model[0], Strange, "0")
    with pytest.raises(CheckpointError, match="0 has a layer that cannot be written down"):
        before.changes(model)


def test_a_module_of_an_unknown_class_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = Structure.of(model)
    model[0] = nn.Bilinear(2, 2, 2)
    with pytest.raises(CheckpointError, match="0 has become a module that cannot be written down"):
        before.changes(model)


def linked(module: nn.Module) -> nn.Sequential:
    model = nn.Sequential(module)
    lay(module, Linked, "0")
    return model


def test_a_layer_that_goes_below_one_that_was_there_goes_there_again() -> None:
    model, fresh = linked(nn.Linear(4, 4)), linked(nn.Linear(4, 4))
    before = Structure.of(model)
    lay(model[0], Upcast, "0")
    changes = before.changes(model)
    assert changes == [{"path": "0", "layers": ["Upcast"]}]
    restore(fresh, changes, KINDS)
    assert type(fresh[0]) is type(model[0])


def test_a_layer_that_went_is_told_by_the_class_below() -> None:
    model, fresh = linked(nn.LayerNorm(4)), linked(nn.LayerNorm(4))
    before = Structure.of(model)
    model[0].__class__ = nn.LayerNorm
    lay(model[0], Upcast, "0")
    restore(fresh, before.changes(model), KINDS)
    assert type(fresh[0]) is type(model[0])
    other = linked(nn.Linear(4, 4))
    before = Structure.of(other)
    other[0].__class__ = nn.Linear
    with pytest.raises(CheckpointError, match="0 has another class, which cannot be written down"):
        before.changes(other)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


def test_what_was_tied_and_is_not_is_apart_again() -> None:
    model, fresh = Tied(), Tied()
    before = Structure.of(model)
    model.second.weight = nn.Parameter(torch.randn(3, 3))
    restore(fresh, before.changes(model), KINDS)
    fresh.load_state_dict(model.state_dict())
    assert equal(outputs(fresh, torch.eye(3)), outputs(model, torch.eye(3)))


def test_what_a_module_no_longer_has_is_taken_from_another() -> None:
    model, fresh = (nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)) for _ in range(2))
    model[0].note = fresh[0].note = "of mine"
    before = Structure.of(model)
    del model[0].bias, model[0].note, model[1].running_mean
    restore(fresh, json.loads(json.dumps(before.changes(model))), KINDS)
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert not hasattr(fresh[0], "note")


def test_a_number_that_all_of_a_parameter_was_is_told_from_several() -> None:
    model, fresh = (nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2))
    before = Structure.of(model)
    model[0].one, model[0].several = nn.Parameter(torch.full((2,), 0.5)), nn.Parameter(torch.tensor([0.5, 2.0]))
    restore(fresh, json.loads(json.dumps(before.changes(model))), KINDS)
    assert began(fresh) == {"0.one": 0.5}
    assert (fresh[0].one.tolist(), fresh[0].several.tolist()) == ([0.5, 0.5], [1.0, 1.0])


class Headed(nn.Module):
    """A model with another head over the same body."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2))


def test_changes_of_what_earlier_ones_added_come_along_to_another_head() -> None:
    changes = [
        {"path": "0.norm", "module": {"kind": "HeadNorm", "values": {}}},
        {"path": "0.norm", "values": {"eps": 1e-3}},
        {"path": "head.norm", "values": {"eps": 1e-3}},
    ]
    found = fitted(Headed(), "Headed", {"base": "Bare", "part": "", "changes": changes[:2]})
    assert found == {
        "base": "Headed",
        "part": "body",
        "changes": [{**change, "path": "body.0.norm"} for change in changes[:2]],
    }
    with pytest.raises(ValueError, match="what was changed in Bare has no place in Headed"):
        fitted(Headed(), "Headed", {"base": "Bare", "part": "", "changes": changes[2:]})


@pytest.mark.parametrize("kind", [FunnelModel, FunnelBaseModel])
def test_an_automatic_class_of_several_builds_the_one_that_was_patched(kind: type[Any]) -> None:
    assert auto_map(kind)["AutoModel"] == f"modeling_normprobe.Patched{kind.__name__}"


def test_the_text_of_the_file_names_what_is_needed_alone() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)).eval()
    before = Structure.of(model)
    [rewrite] = [
        each for each in SETTINGS if each.to_dict() == {**each.to_dict(), "rewrite": "AddQKNorm", "kind": "l2norm"}
    ]
    assert applied(Survey.of(model, {"input_ids": torch.arange(8).reshape(1, 8)}), rewrite) is not None
    text = text_of(GPT2LMHeadModel, before.changes(model))
    assert "class HeadNorm" in text
    assert "class DynamicTanh" not in text
    assert "class PatchedGPT2LMHeadModel(Restored, transformers.GPT2LMHeadModel)" in text
    compile(text, "modeling_normprobe.py", "exec")
