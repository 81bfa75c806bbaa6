from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    RobertaConfig,
    RobertaModel,
    Speech2TextConfig,
    Speech2TextModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperModel,
)

from normprobe.errors import InputError
from normprobe.inputs import inputs_from_config, row_length

TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "bos_token_id": 3, "eos_token_id": 7}
VISION = {**TEXT, "image_size": 32, "patch_size": 16}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 30,
}


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**{**GPT2, **fields})).eval()


def shapes(model: nn.Module, **options: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs, after one forward of the model on them."""
    inputs, words = inputs_from_config(model.eval(), **options)
    assert words
    with torch.no_grad():
        model(**inputs)
    return {name: tuple(value.shape) for name, value in inputs.items()}


def test_ids_are_512_or_as_many_as_there_are_positions() -> None:
    assert shapes(gpt2()) == {"input_ids": (1, 512)}
    assert shapes(gpt2(n_positions=24), batch=2) == {"input_ids": (2, 24)}
    assert shapes(gpt2(), tokens=9) == {"input_ids": (1, 9)}


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 40))
def test_ids_are_ordinary_words_of_the_vocabulary(seed: int, batch: int, tokens: int) -> None:
    ids = inputs_from_config(MODEL, batch, seed, tokens)[0]["input_ids"]
    assert ids.shape == (batch, tokens)
    assert ids.min() >= 0
    assert ids.max() < 20
    assert not {3, 7, 11, 13} & set(ids.flatten().tolist())


MODEL = gpt2()
MODEL.config.image_token_id = 11
MODEL.config.suppress_token_ids = [13]


def test_ids_cover_the_whole_vocabulary_evenly() -> None:
    ids = inputs_from_config(gpt2(), batch=40)[0]["input_ids"]
    counts = torch.bincount(ids.flatten(), minlength=20)
    assert counts[[3, 7]].sum() == 0
    expected = ids.numel() / 18
    kept = counts[counts > 0]
    assert len(kept) == 18
    assert (kept - expected).abs().max() < 6 * expected**0.5  # six standard deviations of a count


def test_seed_decides_and_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (inputs_from_config(MODEL, seed=seed)[0]["input_ids"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_padding_row_of_the_position_table_is_counted() -> None:
    model = RobertaModel(RobertaConfig(**TEXT, vocab_size=30, max_position_embeddings=42, pad_token_id=1))
    assert row_length(model, None) == 40
    assert shapes(model) == {"input_ids": (1, 40)}


def test_smaller_embedding_limits_the_ids() -> None:
    model = gpt2()
    model.resize_token_embeddings(9)
    model.config.vocab_size = 20
    assert inputs_from_config(model)[0]["input_ids"].max() < 9


@pytest.mark.parametrize("tokens", [1, 6])
def test_encoder_decoder_gets_the_ids_shifted(tokens: int) -> None:
    model = BartForConditionalGeneration(BartConfig(**SEQ2SEQ, max_position_embeddings=32))
    inputs = inputs_from_config(model, batch=2, tokens=tokens)[0]
    assert shapes(model, batch=2, tokens=tokens) == {
        "input_ids": (2, tokens),
        "decoder_input_ids": (2, tokens),
    }
    start = model.config.decoder_start_token_id
    assert inputs["decoder_input_ids"][:, 0].tolist() == [start, start]
    assert torch.equal(inputs["decoder_input_ids"][:, 1:], inputs["input_ids"][:, :-1])


def test_t5_has_no_limit_of_positions() -> None:
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    assert shapes(T5Model(config), tokens=700)["decoder_input_ids"] == (1, 700)


@pytest.mark.parametrize(("size", "expected"), [(32, (32, 32)), ((48, 32), (48, 32))])
def test_image_has_the_size_of_the_configuration(size: Any, expected: tuple[int, int]) -> None:
    model = ViTModel(ViTConfig(**{**VISION, "image_size": size}, num_channels=1))
    assert shapes(model, batch=2) == {"pixel_values": (2, 1, *expected)}


def test_convolutional_model_without_a_size_says_so() -> None:
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).eval()
    inputs, words = inputs_from_config(model)
    assert inputs["pixel_values"].shape == (1, 3, 224, 224)
    assert "names no size" in words


def test_noise_is_standard_normal() -> None:
    pixels = inputs_from_config(ViTModel(ViTConfig(**{**VISION, "image_size": 224})))[0]["pixel_values"]
    assert abs(pixels.mean().item()) < 5 / pixels.numel() ** 0.5
    assert abs(pixels.var().item() - 1) < 5 * (2 / pixels.numel()) ** 0.5


def test_waveform_and_both_layouts_of_a_spectrogram() -> None:
    wave = Wav2Vec2Config(**TEXT, conv_dim=(8,) * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    assert shapes(Wav2Vec2Model(wave), batch=2) == {"input_values": (2, 16_000)}
    whisper = WhisperConfig(
        **SEQ2SEQ, max_source_positions=20, max_target_positions=12, num_mel_bins=10, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    assert shapes(WhisperModel(whisper)) == {"input_features": (1, 10, 40), "decoder_input_ids": (1, 12)}
    speech = Speech2TextConfig(**SEQ2SEQ, max_source_positions=600, input_feat_per_channel=10)
    assert shapes(Speech2TextModel(speech), tokens=5)["input_features"] == (1, 256, 10)


def test_text_alone_where_the_image_may_be_left_away() -> None:
    text = {**TEXT, "vocab_size": 40, "num_key_value_heads": 2, "model_type": "llama"}
    vision = {**VISION, "model_type": "clip_vision_model"}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=39)
    assert shapes(LlavaForConditionalGeneration(config), tokens=8) == {"input_ids": (1, 8)}


def test_image_beside_the_text_where_it_is_needed() -> None:
    text = {**TEXT, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39}
    config = CLIPConfig(text_config=text, vision_config=VISION)
    assert shapes(CLIPModel(config)) == {"input_ids": (1, 16), "pixel_values": (1, 3, 32, 32)}


def test_wrappers_are_looked_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    assert shapes(nn.DataParallel(gpt2(n_positions=8))) == {"input_ids": (1, 8)}
    assert shapes(Wrapper(Wrapper(gpt2(n_positions=8)))) == {"input_ids": (1, 8)}
    compiled = torch.compile(gpt2(n_positions=8), backend="eager")
    assert inputs_from_config(compiled)[0]["input_ids"].shape == (1, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_noise_has_the_dtype_and_device_of_the_model(dtype: torch.dtype) -> None:
    model = ViTModel(ViTConfig(**VISION)).to(dtype)
    assert inputs_from_config(model)[0]["pixel_values"].dtype == dtype
    assert inputs_from_config(model.to("meta"))[0]["pixel_values"].device.type == "meta"


def test_model_is_left_alone() -> None:
    model = CLIPModel(CLIPConfig(text_config={**TEXT, "vocab_size": 40}, vision_config=VISION)).train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config = model.config.to_dict()
    inputs_from_config(model)
    assert model.training
    assert model.config.to_dict() == config
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


class Plain(nn.Module):
    """A model that is none of transformers', with a configuration of its own kind."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**fields)
        self.embedding = nn.Embedding(11, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids)


def test_any_object_may_be_the_configuration() -> None:
    assert shapes(Plain(vocab_size=11, max_position_embeddings=6)) == {"input_ids": (1, 6)}


def test_missing_vocabulary_is_named() -> None:
    with pytest.raises(InputError, match=r"(?s)vocab_size.*forward\(input_ids.*pass inputs"):
        inputs_from_config(Plain(hidden_size=4))


def test_model_without_configuration_is_named() -> None:
    with pytest.raises(InputError, match=r"(?s)Linear: no inputs were given.*pass inputs"):
        inputs_from_config(nn.Linear(2, 2))


def test_model_without_a_forward_is_named() -> None:
    class Parts(nn.Module):
        config = PretrainedConfig(vocab_size=11)

    with pytest.raises(InputError, match="Parts: it has no forward"):
        inputs_from_config(Parts())


def test_further_required_arguments_are_named() -> None:
    class Needs(Plain):
        def forward(self, input_ids: Tensor, boxes: Tensor) -> Tensor:
            return self.embedding(input_ids) + boxes

    with pytest.raises(InputError, match=r"what to pass as boxes"):
        inputs_from_config(Needs(vocab_size=11))


def test_a_class_without_a_twin_says_why_nothing_was_tried() -> None:
    class TakesMore(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig, rows: int) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(rows, 4)

        def forward(self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None) -> Tensor:
            raise ValueError("never reached")

    _, words = inputs_from_config(TakesMore(PretrainedConfig(vocab_size=11), 11))
    assert "not tried: no twin on the meta device (TypeError: " in words
    assert "missing 1 required positional argument: 'rows'" in words


def test_model_that_refuses_every_candidate_shows_its_reasons() -> None:
    class Refuses(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(11, 4)

        def forward(self, input_ids: Tensor | None = None, pixel_values: Tensor | None = None) -> Tensor:
            raise ValueError("a graph is needed")

    with pytest.raises(InputError, match=r"(?s)none of those tried fit.*ValueError: a graph is needed"):
        inputs_from_config(Refuses(PretrainedConfig(vocab_size=11)))


@pytest.mark.parametrize("axis", [0, -1])
def test_codes_of_several_code_books_have_a_row_or_a_column_for_each(axis: int) -> None:
    class Codes(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(11, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            codes = input_ids.unflatten(0, (-1, 3)) if axis == 0 else input_ids.unflatten(2, (3, 1))
            return self.embedding(codes).sum(1)  # type: ignore[no-any-return]

    args, words = inputs_from_config(Codes(PretrainedConfig(vocab_size=11, num_codebooks=3)), batch=2, tokens=5)
    assert args["input_ids"].shape == ((6, 5) if axis == 0 else (2, 5, 3))
    assert words.endswith("the same for each of 3 code books")


def test_an_image_may_be_rows_of_patches_with_their_grid() -> None:
    class Patches(PreTrainedModel):
        config_class = PretrainedConfig

        def forward(self, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
            return pixel_values

    args, words = inputs_from_config(Patches(PretrainedConfig(num_patches=9, patch_size=2)), batch=2)
    assert args["pixel_values"].shape == (2, 9, 12)
    assert args["spatial_shapes"].tolist() == [[3, 3], [3, 3]]
    assert words == "seeded standard-normal noise of 9 image patches"


def test_each_reason_is_shown_once_so_that_the_last_ones_are_seen() -> None:
    class WantsAsMany(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(11, 4)

        def forward(self, input_ids: Tensor | None = None, input_features: Tensor | None = None) -> Tensor:
            if input_ids is None or input_features is None:
                raise ValueError("ids or features are missing")
            raise ValueError("as many features as ids, please")

    with pytest.raises(InputError, match="input_ids, input_features: ValueError: as many features as ids, please"):
        inputs_from_config(WantsAsMany(PretrainedConfig(vocab_size=11, num_mel_bins=4)))
