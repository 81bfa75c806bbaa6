"""What `probe`, `plan`, `rewrite` and `mend` refuse before anything runs, each with the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.errors import InputError, SettingError
from normprobe.mending.planned import check_rewrites
from tests.models import decoder

X = torch.ones(1, 4)
CALLS: dict[str, Callable[[Any], Any]] = {
    "probe": lambda model: normprobe.probe(model, X),
    "plan": lambda model: normprobe.plan(model, [normprobe.AddFinalNorm()], X),
    "rewrite": lambda model: normprobe.rewrite(model, [normprobe.AddFinalNorm()], X),
    "mend": lambda model: normprobe.mend(model, X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("model", "found"), [(3, "int: 3"), (nn.Linear, "the class Linear"), (None, "NoneType: None")])
def test_what_is_no_module_is_refused(call: Callable[[Any], Any], model: object, found: str) -> None:
    with pytest.raises(SettingError, match=rf"(?s)expected: a torch\.nn\.Module instance.*found: {found}"):
        call(model)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_lazy_module_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(SettingError, match=r"(?s)0\.weight has no shape yet.*run it once first"):
        call(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("call", [normprobe.plan, normprobe.rewrite])
@pytest.mark.parametrize(
    ("rewrites", "found"),
    [
        ([3], "int: 3"),
        ("AddFinalNorm", "str: 'AddFinalNorm'"),
        (["AddFinalNorm"], "str: 'AddFinalNorm'"),
        (normprobe.AddFinalNorm, r"the class AddFinalNorm\n  try: AddFinalNorm\(\)"),
        ([normprobe.AddFinalNorm], r"the class AddFinalNorm\n  try: AddFinalNorm\(\)"),
        (None, "NoneType: None"),
    ],
)
def test_what_is_no_rewrite_is_refused(call: Callable[..., Any], rewrites: object, found: str) -> None:
    with pytest.raises(SettingError, match=rf"(?s)no rewrite.*normprobe\.AddFinalNorm\(\).*found: {found}"):
        call(nn.Linear(4, 4), rewrites, X)


def test_one_rewrite_stands_for_a_list_of_one() -> None:
    one = normprobe.AddFinalNorm()
    assert check_rewrites(one) == check_rewrites([one]) == (one,)


def test_a_loss_needs_the_backward_level() -> None:
    with pytest.raises(SettingError, match=r'(?s)no gradients are taken.*level="backward"'):
        normprobe.probe(nn.Linear(4, 4), X, loss=lambda output, inputs: output.sum())
    with pytest.raises(SettingError, match=r"(?s)no gradients are taken.*gain \| smoothness"):
        normprobe.probe(nn.Linear(4, 4), X, measures=["cost"], loss=lambda output, inputs: output.sum())
    normprobe.probe(nn.Linear(4, 4), X, measures=["smoothness"], loss=lambda output, inputs: output.sum())
    with pytest.raises(SettingError, match="the loss is no function"):
        normprobe.probe(nn.Linear(4, 4), X, level="backward", loss=3)  # type: ignore[arg-type]


def test_every_row_is_taken_where_that_is_asked_for() -> None:
    model, inputs = decoder("pre")
    long = inputs[:1, :1].expand(1, 100)
    rows = [normprobe.probe(model, long, exact=exact).attention[0].rows for exact in (False, True)]
    assert rows == [64, 100]
    with pytest.raises(SettingError, match="exact= needs a signal"):
        normprobe.probe(model, long, level="structure", exact=True)


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(SettingError, match="the seed is no int"):
        normprobe.probe(nn.Linear(4, 4), X, seed=seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 2**70])
def test_a_seed_is_one_that_torch_takes(seed: int) -> None:
    with pytest.raises(SettingError, match="the seed is no seed of torch"):
        normprobe.probe(nn.Linear(4, 4), X, seed=seed)


def test_a_loss_that_raises_is_named() -> None:
    model, inputs = decoder("pre")

    def loss(output: Any, inputs: Any) -> Any:
        raise KeyError("labels")

    with pytest.raises(InputError, match=r"(?s)the given loss raised.*KeyError: 'labels'") as caught:
        normprobe.probe(model, inputs, level="backward", loss=loss)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_tokenizer_that_raises_is_named() -> None:
    def tokenizer(text: str, **more: Any) -> Any:
        raise ValueError("no vocabulary")

    with pytest.raises(InputError, match=r"(?s)the tokenizer function raised.*ValueError: no vocabulary") as caught:
        normprobe.probe(nn.Linear(4, 4), "words", tokenizer=tokenizer)
    assert "--debug" not in str(caught.value)


def test_no_error_of_the_api_speaks_of_an_option_of_the_command() -> None:
    with pytest.raises(InputError, match=r"the forward of Linear raised") as caught:
        normprobe.probe(nn.Linear(3, 3), X)
    assert "--" not in str(caught.value)


def test_inputs_without_values_are_refused_for_a_model_with_values() -> None:
    with pytest.raises(InputError, match=r"(?s)the inputs hold no values.*tensors on the meta device"):
        normprobe.probe(nn.Linear(4, 4), torch.zeros(2, 4, device="meta"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("normprobe.toml", r"(?s)settings= takes settings.*found: str: 'normprobe.toml'.*load_settings\(path\)"),
        (normprobe.Settings(select=("NP99",)), "`select` of the settings: no check is called 'NP99'"),
        (normprobe.Settings(limits={"NP401": {"max": 1.0}}), "NP401 unresolved-logits has no limit 'max'"),
    ],
)
def test_settings_that_are_none_are_refused_before_the_model_runs(settings: Any, said: str) -> None:
    ran: list[object] = []
    model, inputs = decoder("pre", layers=1)
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(SettingError, match=said):
        normprobe.probe(model, inputs, settings=settings)
    assert ran == []
