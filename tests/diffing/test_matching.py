"""Parts are matched by their order in the data flow, whatever they are called; where they cannot be, that is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.diffing.pairs import aligned
from normprobe.errors import InputError, SettingError
from normprobe.report.diffs.report import DiffReport
from tests.diffing.models import VOCABULARY, decoder, llama_and_port, tokens, twin


def matched(report: DiffReport, subject: str) -> list[tuple[str, str]]:
    return [(match.a, match.b) for match in report.data.matched if match.subject == subject]


def test_a_port_with_other_names_is_the_same_up_to_rounding() -> None:
    theirs, port = llama_and_port()
    report = normprobe.diff(theirs, port)
    assert {(d.severity.value, f"{d.subject} {d.fact}") for d in report.differences} == {
        ("warning", "norm weight_multiply"),  # it multiplies the gain before the cast
        ("note", "weights reordered"),  # rotary pairs side by side
    }
    assert report.signal is not None
    assert report.signal.first is None
    assert len(report.signal.sites) == 19
    assert ("model.layers.1.self_attn", "stack.1") in matched(report, "attention")
    assert ("model.norm", "last") in matched(report, "norm")
    assert report.output is not None
    assert report.output.kl is not None
    assert 0 < report.output.max_abs < 1e-4
    assert report.data.notes == ("B takes its input by position: its forward has no argument input_ids",)


def test_a_fault_in_a_port_is_found_where_it_is() -> None:
    theirs, port = llama_and_port()
    port.stack[1].before_feeding.eps = 1e-2
    report = normprobe.diff(port, theirs)
    assert report.differences[0].fact == "eps"
    assert report.signal is not None
    assert report.signal.first is not None
    site = report.signal.sites[report.signal.first]
    assert (site.a, site.b) == ("stack.1.before_feeding", "model.layers.1.post_attention_layernorm")
    assert "inputs were made from the configuration of B, as A tells too little" in report.data.notes


def test_a_dropped_block_is_found_by_its_weights() -> None:
    other = decoder()
    del other.blocks[1]
    report = normprobe.diff(decoder(), other, tokens())
    assert [d.where for d in report.differences if d.subject == "branch"] == [
        (("blocks.1 (attention)", ""),),
        (("blocks.1 (mlp)", ""),),
    ]
    assert ("blocks.2 (mlp)", "blocks.1 (mlp)") in matched(report, "branch")
    assert ("blocks.2.first", "blocks.1.first") in matched(report, "norm")
    assert report.skipped == ()
    assert report.signal is not None
    assert report.signal.first is not None
    assert report.signal.sites[report.signal.first].a == "blocks.2.first"
    assert {pair.relation for pair in report.weights} == {"equal"}


def test_other_depths_of_other_weights_are_compared_as_far_as_both_go() -> None:
    torch.manual_seed(9)
    other = type(decoder())(depth=5).eval()
    report = normprobe.diff(decoder(), other, tokens())
    facts = {d.fact: (d.a, d.b) for d in report.differences}
    assert facts["depth"] == (6.0, 10.0)
    assert len(matched(report, "branch")) == 6
    assert any("which ones are extra cannot be told" in skip.why for skip in report.skipped)


def test_other_vocabularies() -> None:
    report = normprobe.diff(decoder(), decoder(vocabulary=VOCABULARY + 8), tokens())
    size = next(d for d in report.differences if d.fact == "size")
    assert (size.a, size.b) == (VOCABULARY, VOCABULARY + 8)
    assert report.output is not None
    assert report.output.kl is None
    assert report.output.shape == (2, 12, VOCABULARY)
    assert any(skip.what == "signal at the output" for skip in report.skipped)


def test_a_padded_vocabulary_has_equal_weights_where_both_have_them() -> None:
    small, large = decoder(), decoder(vocabulary=VOCABULARY + 8)
    state = small.state_dict()
    for name in ("embedding.weight", "head.weight"):
        state[name] = torch.cat([state[name], torch.zeros(8, 32)])
    large.load_state_dict(state)
    report = normprobe.diff(small, large, tokens())
    assert {pair.relation for pair in report.weights} == {"equal"}
    assert report.output is not None
    assert report.output.max_abs < 1e-5
    assert {d.fact for d in report.differences} == {"size"}


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_models_of_another_build_are_compared_by_their_outputs() -> None:
    same = normprobe.diff(Flat(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(3, 8))
    assert same.verdict == "differs"
    assert "output values" in [f"{d.subject} {d.fact}" for d in same.differences]
    model = Flat()
    again = nn.Sequential(twin(model.layer), nn.ReLU())
    assert normprobe.diff(model, again, torch.randn(3, 8)).verdict == "same"


class Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


def test_nothing_that_can_be_compared_is_not_the_same() -> None:
    report = normprobe.diff(Integers(), Integers(), torch.randn(2, 3))
    assert report.verdict == "unknown"
    assert not report.failed()
    whys = {skip.what: skip.why for skip in report.skipped}
    assert whys["outputs"] == "A returned no floating point tensor"
    assert "not known to be the same" in whys["verdict"]


def test_padding_may_hold_anything() -> None:
    from transformers import BertConfig, BertModel

    fields: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=2, **fields)).eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    inputs = {"input_ids": tokens(), "attention_mask": mask}

    class Dirty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = twin(model)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.inner(input_ids=input_ids, attention_mask=attention_mask)[0]
            return output + (1 - attention_mask)[..., None]

    report = normprobe.diff(model, Dirty(), inputs)
    assert report.output is not None
    assert report.output.kl is None  # hidden states are no logits
    assert report.signal is not None
    assert report.signal.first is None
    assert all(not site.step for site in report.signal.sites)


def test_inputs_of_its_own_for_b() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder()

        def forward(self, *, words: torch.Tensor, offset: int) -> torch.Tensor:
            return self.inner(words - offset)

    report = normprobe.diff(decoder(), Named(), tokens(), inputs_b={"words": tokens() + 1, "offset": 1})
    assert report.verdict == "same"
    assert report.data.notes == ("B has inputs of its own",)


def test_aligned_in_order_and_by_key() -> None:
    def same(x: str) -> str:
        return x

    assert aligned("ab", "xy", same, same) == ([("a", "x"), ("b", "y")], [], [])
    assert aligned("abab", "ab", same, same) == ([("a", "a"), ("b", "b")], ["a", "b"], [])
    assert aligned("acb", "ab", same, same) == ([("a", "a"), ("b", "b")], ["c"], [])
    assert aligned("a", "", same, same) == ([], ["a"], [])


def test_what_is_refused() -> None:
    with pytest.raises(SettingError, match="unknown level 'backward'"):
        normprobe.diff(decoder(), decoder(), tokens(), level="backward")
    with pytest.raises(SettingError, match=r"a torch\.nn\.Module instance"):
        normprobe.diff(decoder(), "gpt2", tokens())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no inputs were given"):
        normprobe.diff(decoder(), decoder())
