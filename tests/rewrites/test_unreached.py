"""Experts that no token reached are rewritten as those beside them: what is promised holds for other tokens too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normprobe.rewrites import FoldGains, Initialise, MuP, Rewrite, ScaleResidual, Survey, ToRMSNorm, make_plan
from tests.models import HIDDEN, VOCABULARY, WIDTH, Mlp, shuffled
from tests.rewrites.cases import applied, outputs, snapshot

EXPERTS = 6


class Experts(nn.Module):
    """Each token goes to one expert, whose output is multiplied by the probability of that choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.reshape(x.shape)


class Block(nn.Module):
    """x + experts(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.norm(x))
        return found


class Routed(nn.Module):
    """A language model of three such blocks, of which `depth` run, and a part that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.spare, self.depth = nn.Linear(HIDDEN, WIDTH), 3

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for index in range(self.depth):
            x = self.blocks[index](x)
        found: Tensor = self.head(self.norm(x))
        return found


FEW, MANY = torch.tensor([[1, 2, 3]]), torch.arange(VOCABULARY)[None]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return shuffled(Routed()).double()


def unreached(model: nn.Module) -> set[str]:
    """Experts that none of the few tokens goes to."""
    ran: set[str] = set()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
        for name, module in model.named_modules()
        if isinstance(module, Mlp)
    ]
    outputs(model, FEW)
    for hook in hooks:
        hook.remove()
    return {name for name, module in model.named_modules() if isinstance(module, Mlp)} - ran


@pytest.mark.parametrize("rewrite", [FoldGains(), ScaleResidual(), ToRMSNorm()], ids=lambda each: each.name)
def test_an_exact_rewrite_is_exact_for_tokens_that_reach_other_experts(model: nn.Module, rewrite: Rewrite) -> None:
    assert len(unreached(model)) >= 6
    before, kept = outputs(model, MANY), snapshot(model)
    plan = applied(model, FEW, rewrite)
    assert torch.allclose(outputs(model, MANY), before, rtol=0, atol=1e-10)
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("rewrite", [Initialise(), MuP(16), Initialise("deepnorm")], ids=lambda each: each.name)
def test_every_expert_is_drawn_alike_and_what_nothing_calls_stays(model: nn.Module, rewrite: Rewrite) -> None:
    spare = copy.deepcopy(model.spare.state_dict())
    applied(model, FEW, rewrite)
    for block in model.blocks:
        for own in ("up", "down"):
            stds = [float(getattr(expert, own).weight.detach().std()) for expert in block.mlp.experts]
            assert max(stds) / min(stds) < 1.2
            assert not any(getattr(expert, own).bias.any() for expert in block.mlp.experts)
    assert all(torch.equal(value, spare[name]) for name, value in model.spare.state_dict().items())


def test_an_unreached_expert_has_the_place_of_the_one_that_it_is_like(model: nn.Module) -> None:
    sites = {site.parameter: site for site in Survey.of(model, FEW).anatomy.weights}
    every = {site.parameter: site for site in Survey.of(model, MANY).anatomy.weights}
    assert sites.keys() == every.keys() == {n for n, p in model.named_parameters() if p.dim() == 2} - {"spare.weight"}
    for name in unreached(model):
        assert sites[f"{name}.down.weight"].source == f"{name}.up.weight"
        assert (sites[f"{name}.down.weight"].roles, sites[f"{name}.up.weight"].roles) == (("writer",), ("reader",))


@pytest.mark.parametrize(("depth", "apart"), [(1, False), (2, False), (2, True)])
def test_blocks_that_do_not_run_are_no_experts(model: nn.Module, depth: int, apart: bool) -> None:
    """Not where a block holds its router, nor where the routers are a list of their own."""
    model.depth = depth
    if apart:
        model.routers = nn.ModuleList(block.mlp.router for block in model.blocks)
        for block in model.blocks:
            block.mlp.__dict__["router"] = block.mlp._modules.pop("router")
    held = {name: p.detach().clone() for name, p in model.blocks[-1].mlp.named_parameters()}
    applied(model, FEW, Initialise())
    assert all(torch.equal(value, held[name]) for name, value in model.blocks[-1].mlp.named_parameters())


def test_an_expert_of_another_form_stays_out(model: nn.Module) -> None:
    name = min(unreached(model))
    holder, _, own = name.rpartition(".")
    model.get_submodule(holder)[int(own)] = Mlp(WIDTH, 2 * HIDDEN).double()
    plan = make_plan(model, [Initialise()], FEW)
    assert not any(name in touched for site in plan.steps[0][1].sites for touched in site.touched)


def test_alternatives_that_no_router_chooses_from_stay_out() -> None:
    class Tasks(nn.Module):
        """x + tasks[0](read(norm(x)))."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.tasks = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x + self.tasks[0](self.read(self.norm(x)))
            return found

    torch.manual_seed(0)
    model = shuffled(nn.Sequential(Tasks(), Tasks(), nn.LayerNorm(WIDTH)))
    names = {site.parameter for site in Survey.of(model, torch.randn(2, 5, WIDTH)).anatomy.weights}
    assert "0.tasks.0.up.weight" in names
    assert not any(name.startswith(("0.tasks.1", "0.tasks.2")) for name in names)
