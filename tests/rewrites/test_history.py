"""Plans on one model: each is applied as it was planned, and the last one is undone first; or the reason is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    AddOutputNorms,
    AddQKNorm,
    Fixup,
    FoldBatchNorm,
    FoldGains,
    FreezeBatchNorm,
    Initialise,
    MuP,
    Plan,
    QKClip,
    Reparametrise,
    Rewrite,
    ScaleResidual,
    SetEps,
    StoreGains,
    ToDyT,
    ToGroupNorm,
    ToPostNorm,
    ToRMSNorm,
    ToSyncBatchNorm,
    make_plan,
)
from tests.models import Built, decoder, gpt2, llama
from tests.rewrites.cases import outputs, snapshot
from tests.rewrites.rewritten import CASES, PICTURES, cnn, rewritten

pytest.importorskip("transformers")
DECODER: tuple[Rewrite, ...] = (
    AddOutputNorms(),
    AddQKNorm(),
    Fixup(),
    FoldGains(),
    Initialise(),
    MuP(base_width=16),
    QKClip(limit=0.01),
    Reparametrise(),
    ScaleResidual(),
    SetEps(eps=1e-3),
    StoreGains("one_plus_weight"),
    ToDyT(),
    ToPostNorm(),
    ToRMSNorm(),
    ToRMSNorm(exact=False),
)
CNN: tuple[Rewrite, ...] = (
    FoldBatchNorm(),
    FreezeBatchNorm(),
    ToGroupNorm(),
    ToSyncBatchNorm(),
    Fixup(),
    SetEps(eps=1e-3),
    Reparametrise(),
    Initialise(),
)
MODELS: dict[str, tuple[Callable[[], Built], tuple[Rewrite, ...]]] = {
    "gpt2": (lambda: gpt2(n_layer=1), DECODER),
    "cnn": (cnn, CNN),
}
FIRST = [(name, i) for name, (_, rewrites) in MODELS.items() for i in range(len(rewrites))]


def planned(model: nn.Module, inputs: Any, rewrite: Rewrite) -> Plan | None:
    """A plan of the rewrite, applied and not yet; None where it has no place."""
    plan = make_plan(model, [rewrite], inputs)
    return plan if plan.steps[0][1].sites else None


def applied(plan: Plan | None) -> Plan | None:
    try:
        return plan.apply() if plan else None
    except RewriteError:
        return None


def refusal(plan: Plan) -> str | None:
    """Why the plan is not undone; None where it is."""
    try:
        plan.undo()
    except RewriteError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize(("name", "which"), FIRST, ids=lambda value: str(value))
def test_any_order_of_undo_restores_or_is_refused_with_the_model_as_it_was(name: str, which: int) -> None:
    build, rewrites = MODELS[name]
    model, inputs = build()
    bare, order = snapshot(model), list(model.state_dict())
    first = applied(planned(model, inputs, rewrites[which]))
    if first is None:
        assert snapshot(model) == bare
        pytest.skip("it has no place in this model")
    for rewrite in (*rewrites[which:], *rewrites[:which])[: len(rewrites) // 2 + 1]:  # each pair in one order at least
        between = snapshot(model)
        second = applied(planned(model, inputs, rewrite))
        if second is None:
            assert snapshot(model) == between, rewrite
            continue
        both, before = snapshot(model), outputs(model, inputs)
        refused = refusal(first)
        if refused is None:
            outputs(model, inputs)
            second.undo()
            assert snapshot(model) == bare, rewrite
            first = make_plan(model, [rewrites[which]], inputs).apply()
        else:
            assert f"undo {rewrite.name} first" in refused
            assert snapshot(model) == both, rewrite
            assert torch.equal(outputs(model, inputs), before)
            second.undo()
            assert snapshot(model) == between, rewrite
    first.undo()
    assert snapshot(model) == bare
    assert list(model.state_dict()) == order


@pytest.mark.parametrize(("name", "which"), FIRST[::3], ids=lambda value: str(value))
def test_a_plan_from_before_another_one_is_refused_before_anything_moves(name: str, which: int) -> None:
    build, rewrites = MODELS[name]
    model, inputs = build()
    stale, first = planned(model, inputs, rewrites[which]), applied(planned(model, inputs, rewrites[which]))
    if stale is None or first is None:
        pytest.skip("it has no place in this model")
    between = snapshot(model)
    with pytest.raises(RewriteError, match=r"was planned before .* was applied; nothing was changed(.|\n)*plan anew"):
        stale.apply()
    assert snapshot(model) == between
    later = planned(model, inputs, Initialise())
    first.undo()
    if later is not None:
        with pytest.raises(RewriteError, match="was undone"):
            later.apply()
    assert stale.apply().state == "applied"


CHANGED: dict[str, Callable[[nn.Module], object]] = {
    "replaced": lambda model: model.transformer._modules.update(ln_f=nn.Identity()),
    "computed": lambda model: parametrizations.weight_norm(model.transformer.h[0].mlp.c_fc),
    "another parameter": lambda model: model.transformer.ln_f.register_parameter("bias", None),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_plan_is_not_applied_to_a_model_that_was_changed_since(how: str) -> None:
    model, inputs = gpt2()
    plan = make_plan(model, [ToRMSNorm()], inputs)
    CHANGED[how](model)
    between = snapshot(model)
    with pytest.raises(RewriteError, match=r"the model was changed after ToRMSNorm was planned(.|\n)*plan anew"):
        plan.apply()
    assert snapshot(model) == between


@pytest.mark.parametrize("rewrite", [AddQKNorm(), StoreGains("one_plus_weight")], ids=lambda one: one.name)
def test_undo_is_refused_where_someone_else_changed_a_module(rewrite: Rewrite) -> None:
    model, inputs = llama()
    plan = make_plan(model, [rewrite], inputs).apply()
    module = model.get_submodule(plan.steps[0][1].sites[0].path)
    if module.weight.dim() == 1:
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    else:
        parametrizations.weight_norm(module)
    between, before = snapshot(model), outputs(model, inputs)
    with pytest.raises(RewriteError, match=r"changed by something else since(.|\n)*its class is Parametrized"):
        plan.undo()
    assert snapshot(model) == between
    assert torch.equal(outputs(model, inputs), before)


def test_undo_is_refused_where_a_written_parameter_was_exchanged() -> None:
    model, inputs = gpt2()
    plan = make_plan(model, [FoldGains()], inputs).apply()
    module = model.transformer.h[0].attn.c_attn
    had = module.weight
    module.weight = nn.Parameter(had.detach().clone())
    with pytest.raises(RewriteError, match=r"c_attn.weight was changed by something else(.|\n)*another parameter"):
        plan.undo(anyway=True)
    module.weight = had
    plan.undo()


def test_a_child_that_the_plan_put_in_and_that_was_exchanged_is_not_thrown_away() -> None:
    model, inputs = gpt2()
    plan = make_plan(model, [AddOutputNorms()], inputs).apply()
    module = model.get_submodule(plan.steps[0][1].sites[0].path)
    had, module.output_norm = module.output_norm, nn.LayerNorm(32)
    with pytest.raises(RewriteError, match="its child output_norm is another one"):
        plan.undo()
    module.output_norm = had
    plan.undo()


@pytest.mark.parametrize("name", [name for name in CASES | PICTURES if name != "UpcastNorms"])
def test_what_comes_back_is_in_the_dtype_that_the_model_has(name: str) -> None:
    wanted = (CASES | PICTURES)[name][0]()[0].bfloat16().state_dict()
    model, _, plan = rewritten(name)
    model.bfloat16()
    plan.undo()
    found = model.state_dict()
    assert list(found) == list(wanted)
    assert [key for key in wanted if not _same(found[key], wanted[key])] == []


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a, b)


def test_a_model_in_more_than_one_dtype_gets_nothing_back() -> None:
    model, _, plan = rewritten("ToGroupNorm")
    model[0].double()
    with pytest.raises(RewriteError, match=r"what it took out is float32 on cpu(.|\n)*float32 on cpu, float64 on cpu"):
        plan.undo()
    model.double()
    plan.undo()
    assert {p.dtype for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()} == {torch.float64}


def trained(model: nn.Module, inputs: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("rewrite", [FoldGains(), Reparametrise()], ids=lambda one: one.name)
def test_parameters_that_were_trained_since_are_not_written_over_unless_told(rewrite: Rewrite, cast: bool) -> None:
    model, inputs = gpt2()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plan = make_plan(model, [rewrite], inputs).apply()
    if cast:
        model.double()
    trained(model, inputs)
    between = snapshot(model)
    with pytest.raises(RewriteError, match=r"have other values since(.|\n)*undo\(anyway=True\)"):
        plan.undo()
    assert snapshot(model) == between
    plan.undo(anyway=True)
    now, name = model.state_dict(), "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(now[name], start[name].to(now[name].dtype))
    assert not torch.equal(now["transformer.wpe.weight"], start["transformer.wpe.weight"].to(now[name].dtype))


def test_a_rewrite_that_wrote_no_values_is_undone_after_training() -> None:
    model, inputs = gpt2()
    before = list(snapshot(model))
    plan = make_plan(model, [AddQKNorm()], inputs).apply()
    trained(model, inputs)
    plan.undo()
    assert list(snapshot(model)) == before


def test_a_model_that_was_rewritten_is_let_go() -> None:
    model, inputs = decoder("pre")
    plan = make_plan(model, [SetEps(eps=1e-3)], inputs).apply()
    held = weakref.ref(model.get_submodule(plan.steps[0][1].sites[0].path))
    del model, plan
    gc.collect()
    assert held() is None


def test_two_plans_that_switch_the_fused_path_off_are_undone_in_order() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    before, inputs = snapshot(model), torch.randn(2, 5, 32)
    first = make_plan(model, [SetEps(eps=1e-3, only="norm1")], inputs).apply()
    second = make_plan(model, [SetEps(eps=1e-3, only="norm2")], inputs).apply()
    first.undo()
    second.undo()
    assert snapshot(model) == before
