"""Names must not matter: a model whose classes and attributes have random names has the same Anatomy."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of
from tests.models import HEADS, VOCABULARY, WIDTH, RMSNorm, ids, shuffled

SLOTS = tuple(
    [
        "embed",
        "blocks",
        "norm_a",
        "norm_b",
        "qkv",
        "q_norm",
        "k_norm",
        "out",
        "up",
        "down",
        "attend",
        "mlp",
        "last",
        "head",
    ]
)
CLASSES = ("Part", "Attend", "Feed", "Block", "Model")
Names = dict[str, str]
UNSHRUNK = (Phase.explicit, Phase.generate)  # a smaller failing example says no more, and takes minutes


class Part(nn.Module):
    """A module whose children are registered under the names that `names` gives to its slots."""

    def __init__(self, names: Names, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.names = names
        for slot, part in parts.items():
            self.add_module(names[slot], part)

    def part(self, slot: str) -> nn.Module:
        return getattr(self, self.names[slot])


def attend(self: Part, x: Tensor) -> Tensor:
    batch, tokens, _ = x.shape
    q, k, v = self.part("qkv")(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    q, k = self.part("q_norm")(q), self.part("k_norm")(k)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.part("out")(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


def feed(self: Part, x: Tensor) -> Tensor:
    return self.part("down")(F.silu(self.part("up")(x)))


def block(self: Part, x: Tensor) -> Tensor:
    x = x + self.part("attend")(self.part("norm_a")(x))
    return x + self.part("norm_b")(self.part("mlp")(x))


def model(self: Part, input_ids: Tensor) -> Tensor:
    x = self.part("embed")(input_ids)
    for each in self.part("blocks").children():
        x = each(x)
    return self.part("head")(self.part("last")(x))


FORWARDS = {"Part": None, "Attend": attend, "Feed": feed, "Block": block, "Model": model}


def build(names: Names) -> nn.Module:
    """The model with every slot and class under the name given."""
    torch.manual_seed(0)

    def make(kind: str, **parts: nn.Module) -> nn.Module:
        return type(names[kind], (Part,), {"forward": FORWARDS[kind]})(names, parts)

    def norm() -> nn.Module:
        return type(names["Part"], (RMSNorm,), {})(WIDTH)

    def head_norm() -> nn.Module:
        return type(names["Part"], (RMSNorm,), {})(WIDTH // HEADS)

    def one_block() -> nn.Module:
        qkv, out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        mixer = make("Attend", qkv=qkv, q_norm=head_norm(), k_norm=head_norm(), out=out)
        mlp = make("Feed", up=nn.Linear(WIDTH, 2 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))
        return make("Block", norm_a=norm(), attend=mixer, norm_b=norm(), mlp=mlp)

    whole = make(
        "Model",
        embed=nn.Embedding(VOCABULARY, WIDTH),
        blocks=nn.ModuleList(one_block() for _ in range(2)),
        last=norm(),
        head=nn.Linear(WIDTH, VOCABULARY),
    )
    return shuffled(whole)


def facts(names: Names) -> Any:
    """The Anatomy of the model so named, its names turned back."""
    text = anatomy_of(build(names), ids()).model_dump_json()
    back = {new: old for old, new in names.items()}
    return json.loads(re.sub(r"[A-Za-z_]\w*", lambda m: back.get(m.group(), m.group()), text))


PLAIN = {name: name for name in (*SLOTS, *CLASSES)}
MISLEADING = [
    "layernorm",
    "rmsnorm",
    "attention",
    "mlp",
    "lm_head",
    "ln_f",
    "norm",
    "q_proj",
    "final_layer_norm",
    "Linear",
]


WORDS = st.from_regex(r"x[a-z]{3,8}_", fullmatch=True)
RENAMINGS = st.lists(WORDS, min_size=len(PLAIN), max_size=len(PLAIN), unique=True)


@settings(max_examples=6, phases=UNSHRUNK)
@given(new=RENAMINGS)
def test_random_names(new: list[str]) -> None:
    assert facts(dict(zip(PLAIN, new, strict=True))) == facts(PLAIN)


@settings(max_examples=4, phases=UNSHRUNK)
@given(order=st.permutations(MISLEADING), rest=st.permutations(range(len(PLAIN))))
def test_misleading_names(order: list[str], rest: list[int]) -> None:
    """Every slot and class gets a name that says something else."""
    new = [*(f"{word}_x" for word in order), *(f"norm{i}_x" for i in range(len(PLAIN) - len(order)))]
    assert facts(dict(zip(PLAIN, (new[i] for i in rest), strict=True))) == facts(PLAIN)


def test_the_plain_reading_is_right() -> None:
    """What the renamed models are held against is itself no empty Anatomy."""
    found = facts(PLAIN)
    (stream,) = found["streams"]
    assert [(b["kind"], b["placement"]) for b in stream["branches"]] == [("attention", "pre"), ("mlp", "output")] * 2
    assert (stream["final_norm"], len(found["norms"]), len(found["attention"])) == ("last", 9, 2)
    assert found["attention"][0]["qk_norm"]["query"] == "blocks.0.attend.q_norm"


class ByName(nn.Module):
    """Blocks held under words instead of in a list, the adds inside their parts."""

    def __init__(self, words: tuple[str, ...]) -> None:
        super().__init__()
        self.stack = nn.ModuleDict({word: nn.ModuleDict({"first": Added(), "second": Added()}) for word in words})
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.stack.values():
            x = each["second"](each["first"](x))
        return self.last(x)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks_of(words: tuple[str, ...]) -> list[str]:
    torch.manual_seed(0)
    (stream,) = anatomy_of(shuffled(ByName(words)), torch.randn(2, 8, WIDTH)).streams
    return [b.block for b in stream.branches]


def test_blocks_under_words_are_blocks_as_those_in_a_list() -> None:
    words, numbers = blocks_of(("one", "two", "three")), blocks_of(("0", "1", "2"))
    assert [b.replace("one", "0").replace("two", "1").replace("three", "2") for b in words] == numbers


class Uneven(nn.Module):
    """Stages whose blocks differ: an MLP alone, or a mixer and an MLP."""

    class Block(nn.Module):
        def __init__(self, mixes: bool) -> None:
            super().__init__()
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if mixes else None
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if self.mix is not None:
                x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
            return x + self.down(torch.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        plan = ((False, False, True), (False, True, True))
        self.stages = nn.Sequential(*(nn.Sequential(*(self.Block(mixes) for mixes in stage)) for stage in plan))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stages(x)
        return y


def test_uneven_blocks_of_several_stages_keep_their_own_names() -> None:
    (stream,) = anatomy_of(Uneven(), torch.randn(2, 5, WIDTH)).streams
    expected = ["0.0", "0.1", "0.2", "0.2", "1.0", "1.1", "1.1", "1.2", "1.2"]
    assert [b.block for b in stream.branches] == [f"stages.{name}" for name in expected]
