from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from normprobe.errors import SettingError, TargetError
from normprobe.targets import TargetOptions, resolve

SOURCE = """
import sibling
import torch
from torch import nn

print("printed while importing")
READY = nn.Linear(2, 2)
NUMBER = 3

def plain():
    print("printed by the factory")
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train()

def with_tensor():
    return plain(), torch.ones(2, 4)

def with_tuple():
    return plain(), (torch.ones(2, 4),)

def with_dict():
    return plain(), {"input": torch.ones(2, 4)}

def with_text():
    return plain(), "some text"

def wrong():
    return {"model": 1}

def pair_of_models():
    return plain(), plain()

def nothing():
    pass

def needs(width, depth=2):
    return plain()

def raises():
    raise ValueError("width must be even")

def leaves():
    raise SystemExit(3)

class Inner:
    @staticmethod
    def build():
        return nn.Linear(sibling.WIDTH, 3)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text("WIDTH = 5\n")
    path = tmp_path / "models_of_mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(autouse=True)
def _no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sibling", "models_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("name", ["with_tensor", "with_tuple", "with_dict"])
def test_model_with_inputs(source: Path, name: str) -> None:
    loaded = resolve(f"{source}:{name}")
    args, kwargs = (loaded.inputs, {}) if isinstance(loaded.inputs, tuple) else ((), loaded.inputs)
    assert loaded.model(*args, **kwargs).shape == (2, 4)
    assert not any(module.training for module in loaded.model.modules())
    assert (loaded.target.source, loaded.target.inputs) == ("factory", "given by the factory")


def test_model_alone_has_no_inputs_and_says_why(source: Path) -> None:
    loaded = resolve(f"{source}:plain")
    assert loaded.inputs is None
    assert any(note.startswith("no inputs:") for note in loaded.notes)


def test_ready_model_and_dotted_name(source: Path) -> None:
    assert resolve(f"{source}:READY").target.class_name == "Linear"
    assert resolve(f"{source}:Inner.build").target.parameters == 18


def test_dtype_and_device_move_model_and_inputs(source: Path) -> None:
    loaded = resolve(f"{source}:with_tensor", TargetOptions(dtype="float64"))
    assert loaded.target.dtype == "float64"
    assert loaded.inputs[0].dtype == torch.float64


def test_factory_is_seeded_and_the_state_put_back(source: Path) -> None:
    before = torch.get_rng_state()
    first, again = (resolve(f"{source}:plain", TargetOptions(seed=5)).model for _ in range(2))
    assert torch.equal(first[0].weight, again[0].weight)
    assert torch.equal(before, torch.get_rng_state())


def test_meta_builds_without_memory(source: Path) -> None:
    assert resolve(f"{source}:plain", TargetOptions(meta=True)).target.device == "meta"


def test_what_the_factory_prints_stays_off_stdout(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolve(f"{source}:plain")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "printed by the factory" in printed.err


def test_search_path_is_put_back(source: Path) -> None:
    before = list(sys.path)
    resolve(f"{source}:plain")
    with pytest.raises(TargetError, match="raised"):
        resolve(f"{source}:raises")
    assert sys.path == before


def test_own_error_is_shown_with_its_line(source: Path) -> None:
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "width must be even" in text)
    with pytest.raises(
        TargetError, match=rf"(?s)the factory raised.*ValueError: width must be even at .*mine\.py:{line}"
    ) as caught:
        resolve(f"{source}:raises")
    assert isinstance(caught.value.__cause__, ValueError)


def test_exit_of_a_script_is_an_error(source: Path) -> None:
    with pytest.raises(TargetError, match="SystemExit: 3"):
        resolve(f"{source}:leaves")


@pytest.mark.parametrize("name", ["wrong", "nothing", "pair_of_models", "with_text"])
def test_wrong_return_is_named(source: Path, name: str) -> None:
    with pytest.raises(TargetError, match=r"returned no model|inputs cannot be used"):
        resolve(f"{source}:{name}")


def test_arguments_are_named(source: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)takes arguments.*needs\(width\)"):
        resolve(f"{source}:needs")


def test_number_is_no_factory(source: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)NUMBER is not a function.*int"):
        resolve(f"{source}:NUMBER")


def test_missing_name_lists_what_there_is(source: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)has no factory.*plain, with_tensor"):
        resolve(f"{source}:factory")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no such file: .*gone\.py"):
        resolve(f"{tmp_path}/gone.py:factory")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"SyntaxError.*broken\.py:1"),
        ("import no_such_package\n", "ModuleNotFoundError.*no_such_package"),
        ("1 / 0\n", r"ZeroDivisionError: division by zero at .*broken\.py:1"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(TargetError, match=f"(?s)importing .* failed.*{message}"):
        resolve(f"{path}:factory")


def test_module_of_the_current_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    assert resolve("models_of_mine:Inner.build").target.parameters == 18


def test_installed_module() -> None:
    assert resolve("torch.nn:Identity").target.class_name == "Identity"


def test_missing_module_is_named() -> None:
    with pytest.raises(TargetError, match=r"no module named no_such_package"):
        resolve("no_such_package.models:factory")


def test_file_alone_asks_for_the_function(source: Path) -> None:
    with pytest.raises(TargetError, match=r"models_of_mine\.py:factory"):
        resolve(str(source))


MORE = """
import torch
from torch import nn

def build():
    return nn.Linear(4, 4), torch.ones(2, 4)

def bare():
    return nn.Linear(4, 4)

def on_meta():
    with torch.device("meta"):
        return nn.Linear(4, 4), torch.ones(2, 4)

def lazy():
    return nn.LazyLinear(4), torch.ones(2, 4)
""" + "".join(f"\ndef other_{index}():\n    return None\n" for index in range(9))


@pytest.fixture
def more(tmp_path: Path) -> Path:
    path = tmp_path / "more.py"
    path.write_text(MORE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"revision": "main"}, "--revision"),
        ({"config_only": True}, "--config-only"),
        ({"allow_pickle": True}, "--allow-pickle"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
        ({"text": "words"}, "--text"),
        ({"text_file": __file__}, "--text-file"),
        ({"tokens": 8}, "--tokens"),
        ({"batch": 2}, "--batch"),
    ],
)
def test_an_option_without_effect_is_refused(more: Path, options: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=rf"{named} has no effect: (a|the) factory"):
        resolve(f"{more}:build", TargetOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"tokens": 8}, {"batch": 2}])
def test_rows_of_inputs_that_cannot_be_made_are_refused(more: Path, options: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="no inputs can be made"):
        resolve(f"{more}:bare", TargetOptions(**options))  # type: ignore[arg-type]
    assert resolve(f"{more}:bare").inputs is None


def test_a_wrong_name_gets_close_ones_and_a_list_that_says_where_it_ends(more: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)more\.py has no biuld.* and 5 more.*did you mean build\?") as caught:
        resolve(f"{more}:biuld")
    assert "normprobe_target" not in str(caught.value)


def test_a_factory_that_builds_on_meta_needs_meta(more: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)weight is on the meta device.*--meta reads"):
        resolve(f"{more}:on_meta")
    assert resolve(f"{more}:on_meta", TargetOptions(meta=True)).target.device == "meta"


def test_a_lazy_module_must_have_run(more: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)lazy module, weight has no shape yet.*run it once first"):
        resolve(f"{more}:lazy")
