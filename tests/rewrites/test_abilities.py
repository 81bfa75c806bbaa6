"""What a model could do before a rewrite it can do after it."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import normprobe
from normprobe.rewrites import Plan
from tests.rewrites.rewritten import CASES, PICTURES, rewritten

pytest.importorskip("transformers")
EVERY = CASES | PICTURES
WEIGHTS = "FoldGains", "Initialise", "QKClip"  # whose forward is the one that it was
AS_LLAMA = tuple(  # where the compiler meets what it met in Llama
    f"{name}-gpt2"
    for name in (
        "ToPostNorm-deepnorm",
        "ScaleResidual-layerscale",
        "Fixup",
        "Reparametrise",
        "AddQKNorm",
        "AddFinalNorm",
    )
)
UNPICKLED = "Reparametrise"  # torch refuses to pickle parametrised modules


@functools.cache
def made(name: str) -> tuple[nn.Module, Any, Plan]:
    """Left as it is by every test; those that change it take a copy."""
    model, inputs, plan = rewritten(name)
    return (moved(model) if name.startswith("Fixup") else model), inputs, plan  # Fixup makes the head 0


@functools.cache
def alike(name: str) -> nn.Module:
    """The model rewritten a second time; to be copied."""
    return rewritten(name)[0]


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        return run(model, inputs)


def run(model: nn.Module, inputs: Any) -> Tensor:
    found: Tensor = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
    return found


def gradients(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    run(model, inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def moved(model: nn.Module) -> nn.Module:
    """The model with other values everywhere, as after some training."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", CASES)
def test_it_generates_what_the_full_forward_says(name: str) -> None:
    model, inputs, _ = made(name)
    ids = inputs["input_ids"]
    written = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(5):
        ids = torch.cat((ids, outputs(model, {"input_ids": ids})[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(written, ids)


@pytest.mark.parametrize("name", EVERY)
def test_copies_and_pickles_compute_the_same_and_hold_tensors_of_their_own(name: str) -> None:
    model, inputs, _ = made(name)
    wanted, held = outputs(model, inputs), {id(p) for p in model.parameters()}
    twins = [copy.deepcopy(model)]
    if not name.startswith(UNPICKLED):
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert type(twin) is type(model)
        assert torch.equal(outputs(twin, inputs), wanted)
        assert held.isdisjoint(id(p) for p in twin.parameters())
        assert gradients(twin, inputs)
        assert all(p.grad is None for p in model.parameters())
        moved(twin)
        assert not torch.equal(outputs(twin, inputs), wanted)
        assert torch.equal(outputs(model, inputs), wanted)


@pytest.mark.parametrize("name", PICTURES)  # of the others what save_pretrained writes does, below
def test_its_state_goes_into_a_model_rewritten_alike(name: str) -> None:
    model, inputs, _ = made(name)
    model = moved(copy.deepcopy(model))
    twin = copy.deepcopy(alike(name))
    assert not torch.equal(outputs(twin, inputs), outputs(model, inputs))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(outputs(twin, inputs), outputs(model, inputs))


@pytest.mark.parametrize("name", CASES)
def test_what_save_pretrained_writes_goes_into_a_model_rewritten_alike(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, inputs, _ = made(name)
    model = moved(copy.deepcopy(model))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.to_dict().keys() == model.config.to_dict().keys()
    twin = copy.deepcopy(alike(name))
    missing, unexpected = twin.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    twin.tie_weights()
    assert not unexpected
    assert set(missing) <= set(getattr(model, "_tied_weights_keys", None) or ())
    assert torch.equal(outputs(twin, inputs), outputs(model, inputs))


@pytest.mark.parametrize("name", CASES)
def test_checkpointed_activations_give_the_same_gradients(name: str) -> None:
    model, inputs, _ = made(name)
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = gradients(model, inputs)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    found = gradients(model, inputs)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in EVERY if name.split("-")[0] not in WEIGHTS and name not in AS_LLAMA])
def test_it_compiles_into_one_graph(name: str) -> None:
    model, inputs, _ = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs(compiled, inputs), outputs(model, inputs), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", [name for name in EVERY if name != "ToSyncBatchNorm"]
)  # torch has it run on GPUs alone
def test_it_runs_distributed(name: str, one_process: None) -> None:
    model, inputs, _ = made(name)
    model = copy.deepcopy(model)
    wanted = gradients(model, inputs)
    wrapped = nn.parallel.DistributedDataParallel(model)
    found = gradients(wrapped, inputs)
    assert {key.removeprefix("module.") for key in found} == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[f"module.{key}"], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
def test_it_goes_to_bfloat16_and_back(name: str) -> None:
    model, inputs, _ = made(name)
    wanted = outputs(model, inputs)
    half = copy.deepcopy(model).to(torch.bfloat16)
    given = inputs if isinstance(inputs, dict) else inputs.to(torch.bfloat16)
    found = outputs(half, given)
    assert found.dtype is torch.bfloat16
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    scale = float(wanted.abs().max())
    assert float((found.float() - wanted).abs().max()) < 0.1 * scale
    assert float((outputs(half.float(), inputs) - wanted).abs().max()) < 0.1 * scale


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("-gpt2")])
def test_peft_wraps_it(name: str) -> None:
    import peft

    model, inputs, _ = made(name)
    wanted = outputs(model, inputs)
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules="all-linear"))
    torch.testing.assert_close(outputs(wrapped, inputs), wanted, rtol=1e-5, atol=1e-6)
    found = gradients(wrapped, inputs)
    assert found
    assert all("lora_" in key for key in found)


@pytest.mark.parametrize("name", EVERY)
def test_probe_reads_it_again_as_what_was_promised_and_what_it_is_named(name: str) -> None:
    model, inputs, plan = made(name)
    report = normprobe.probe(model, inputs)
    ((rewrite, found),) = plan.steps
    rewrite.confirm(found.sites, report.anatomy)
    assert report.anatomy.streams
    assert [one.message for one in report.findings if one.code == "NP108"] == []
    assert not [row for row in report.skipped if "Error" in row.why]
    twin = normprobe.probe(copy.deepcopy(model), inputs)
    assert twin.anatomy == report.anatomy
