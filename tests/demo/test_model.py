"""The bundled model: parts against closed forms, loss against its card, its one defect, its health."""

from __future__ import annotations

import re
from math import log, sqrt
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normprobe.demo import Decoder, build, decode, encode, heldout_text, load
from normprobe.demo.model import ALPHABET, CONTEXT, Attention, rotate

MAX_BYTES = 400_000
MAX_LOGIT = 50.0


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load()


@pytest.fixture(scope="module")
def card(root: Path) -> str:
    return (root / "normprobe" / "demo" / "CARD.md").read_text(encoding="utf-8")


def stated(card: str, label: str) -> float:
    """The number in the card's table row that starts with `label`."""
    found = re.search(rf"^\| {re.escape(label)}[^|]*\| ([\d.,]+)", card, re.MULTILINE)
    assert found, f"the card has no row {label!r}"
    return float(found[1].replace(",", ""))


def heldout_windows() -> tuple[Tensor, Tensor]:
    tokens = encode(heldout_text())
    count = (len(tokens) - 1) // CONTEXT
    inputs, targets = tokens[: count * CONTEXT], tokens[1 : count * CONTEXT + 1]
    return inputs.view(count, CONTEXT), targets.view(count, CONTEXT)


def bits(model: Decoder) -> float:
    inputs, targets = heldout_windows()
    with torch.no_grad():
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item() / log(2)


def entropy(text: str) -> float:
    """Bits per character of a model that knows only how often each character occurs in `text`."""
    share = torch.bincount(encode(text)).double() / len(text)
    return -(share * share.clamp_min(1e-300).log2()).sum().item()


def test_the_weights_reach_the_loss_on_the_card(model: Decoder, card: str) -> None:
    assert bits(model) == pytest.approx(stated(card, "Held-out loss"), abs=0.002)


def test_the_model_has_learnt_more_than_letter_frequencies(model: Decoder, card: str) -> None:
    unigram = entropy(heldout_text())
    assert unigram == pytest.approx(stated(card, "Entropy of the held-out characters"), abs=0.001)
    assert bits(model) < unigram / 2


def test_untrained_weights_do_not_reach_it() -> None:
    assert bits(Decoder().eval()) > 5.0


def test_the_card_states_the_number_of_parameters(model: Decoder, card: str) -> None:
    assert sum(p.numel() for p in model.parameters()) == stated(card, "Parameters")


def test_build_gives_a_model_in_eval_mode_and_heldout_tokens() -> None:
    model, tokens = build()
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokens.shape == (1, CONTEXT)
    assert tokens.dtype == torch.int64
    assert decode(tokens[0]) == heldout_text()[:CONTEXT]
    assert model(tokens).shape == (1, CONTEXT, len(ALPHABET))


def test_the_weights_are_finite_and_small_enough_to_ship(root: Path, model: Decoder) -> None:
    assert all(p.isfinite().all() for p in model.parameters())
    assert (root / "normprobe" / "demo" / "model.safetensors").stat().st_size < MAX_BYTES


def test_the_stream_reaches_the_head_without_a_norm(model: Decoder) -> None:
    reached: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, args: reached.append(args[0]))
    twin = Decoder(final_norm=True).eval()
    twin.load_state_dict(model.state_dict(), strict=False)
    twin_handle = twin.head.register_forward_pre_hook(lambda _, args: reached.append(args[0]))
    inputs, _ = heldout_windows()
    with torch.no_grad():
        model(inputs[:4]), twin(inputs[:4])
    handle.remove(), twin_handle.remove()
    raw, normed = (x.square().mean(-1).sqrt() for x in reached)
    assert raw.std() / raw.mean() > 0.05
    assert normed.std() / normed.mean() < 1e-3


def test_no_token_sees_what_follows_it(model: Decoder) -> None:
    tokens = encode(heldout_text()[:40])[None]
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % len(ALPHABET)
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


def test_attention_agrees_with_a_float64_reference() -> None:
    attention = Attention(16, 2).double()
    x_BTD = torch.randn(3, 9, 16, dtype=torch.float64)
    parts = attention.query_key_value(x_BTD).view(3, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
    query, key, value = rotate(parts[0]), rotate(parts[1]), parts[2]
    logits = query @ key.mT / sqrt(8)
    logits = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = attention.output((logits.softmax(-1) @ value).transpose(1, 2).reshape(3, 9, 16))
    torch.testing.assert_close(attention(x_BTD), expected)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 12, dtype=torch.float64)
    products = rotate(query.expand(1, 1, 20, 12)) @ rotate(key.expand(1, 1, 20, 12)).mT
    for distance in (0, 3, 11):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert products[0, 0].diagonal(3)[0] != products[0, 0].diagonal(-3)[0]


def test_rotary_keeps_the_length_of_a_vector() -> None:
    x_BHTK = torch.randn(2, 3, 50, 12, dtype=torch.float64)
    torch.testing.assert_close(rotate(x_BHTK).norm(dim=-1), x_BHTK.norm(dim=-1), atol=1e-6, rtol=0)


@given(st.text(alphabet=ALPHABET, min_size=1))
def test_decode_undoes_encode(text: str) -> None:
    assert decode(encode(text)) == text


def test_a_foreign_character_is_named() -> None:
    with pytest.raises(ValueError, match=r"knows 61 characters, not '#Q'"):
        encode("a Q and a #")


def test_the_rest_of_the_model_is_healthy(model: Decoder) -> None:
    """The residual stream keeps its scale within a factor of three, and attention logits stay under the
    limit of the check on them."""
    streams: list[Tensor] = []
    logits: list[Tensor] = []

    def look(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        x_BTD = args[0]
        query, key = (
            rotate(part.view(*x_BTD.shape[:2], 4, 12).transpose(1, 2))
            for part in module.query_key_value(x_BTD).chunk(3, dim=-1)[:2]
        )
        logits.append(query @ key.mT / sqrt(12))

    handles = [block.attention.register_forward_pre_hook(look) for block in model.blocks]
    for reader in (*model.blocks, model.head):
        handles.append(reader.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
    with torch.no_grad():
        model(heldout_windows()[0][:8])
    for handle in handles:
        handle.remove()
    rms = torch.stack([x.square().mean(-1).sqrt().median() for x in streams])
    assert len(rms) == 7
    assert rms.max() / rms.min() < 3
    assert max(x.abs().max() for x in logits) < MAX_LOGIT
