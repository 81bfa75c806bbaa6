"""Configurations are made small by the meaning of their fields."""

from __future__ import annotations

import pytest
from transformers import (
    CONFIG_MAPPING,
    GPTNeoConfig,
    JambaConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3NextConfig,
    SwinConfig,
    ZambaConfig,
)

from benchmarks.shrink import ALL, LEVELS, kept_layers, shrunken


def test_every_combination_of_settings_keeps_its_first_layer() -> None:
    assert kept_layers(["a", "a", "b", "a", "c"]) == [0, 2, 4]


def test_layers_of_one_setting_are_the_first_three() -> None:
    assert kept_layers([()] * 9) == [0, 1, 2]


def test_two_layers_of_each_combination_where_asked() -> None:
    assert kept_layers(["a", "b", "a", "b", "a", "b"], twice=True) == [0, 1, 2, 3]


def test_no_more_layers_than_there_are() -> None:
    assert kept_layers([(), ()]) == [0, 1]


def test_widths_layers_and_vocabulary_become_small() -> None:
    small = shrunken(Qwen2Config(num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8), ALL)
    found = (small.num_hidden_layers, small.hidden_size, small.num_attention_heads, small.num_key_value_heads)
    assert found == (3, 64, 4, 2)
    assert small.vocab_size == 128


def test_fields_that_the_constructor_computes_are_computed_again() -> None:
    assert ZambaConfig().attention_hidden_size == 2 * ZambaConfig().hidden_size
    assert shrunken(ZambaConfig(), ALL).attention_hidden_size == 2 * 64


def test_as_many_key_heads_as_query_heads_stay_so() -> None:
    small = shrunken(LlamaConfig(num_attention_heads=32, num_key_value_heads=32), ALL)
    assert small.num_key_value_heads == small.num_attention_heads == 4


def test_per_layer_lists_fit_the_layers_and_keep_each_kind() -> None:
    small = shrunken(Qwen3NextConfig(), ALL)
    assert len(small.layer_types) == small.num_hidden_layers
    assert set(small.layer_types) == {"linear_attention", "full_attention"}


def test_periods_are_short_enough_to_show_each_kind() -> None:
    assert set(shrunken(JambaConfig(), ALL).layers_block_type) == set(JambaConfig().layers_block_type)


def test_nested_patterns_agree_with_the_number_of_layers() -> None:
    small = shrunken(GPTNeoConfig(), ALL)
    assert small.attention_layers == ["global", "local"]
    assert small.num_layers == 2


def test_stages_keep_their_widths_and_lose_depth() -> None:
    small = shrunken(SwinConfig(depths=[2, 2, 6, 2]), ALL)
    assert list(small.depths) == [2, 2, 2, 2]
    assert small.embed_dim == SwinConfig().embed_dim
    assert small.image_size == 64


def test_parts_are_shrunk_too() -> None:
    small = shrunken(CONFIG_MAPPING["gemma3"](), ALL)
    assert small.text_config.hidden_size == 64
    assert small.vision_config.num_hidden_layers == 3


def test_special_ids_stay_inside_the_vocabulary_and_differ() -> None:
    config = LlamaConfig(vocab_size=32000, bos_token_id=31998, eos_token_id=31999, pad_token_id=31997)
    small = shrunken(config, ALL)
    ids = (small.bos_token_id, small.eos_token_id, small.pad_token_id)
    assert len(set(ids)) == 3
    assert max(ids) < small.vocab_size


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3", "t5", "vit"])
def test_the_last_level_is_the_default(model_type: str) -> None:
    default = CONFIG_MAPPING[model_type]()
    assert shrunken(default, LEVELS[-1]).to_dict() == default.to_dict()
