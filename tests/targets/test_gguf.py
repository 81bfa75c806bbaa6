from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch

from normprobe.errors import TargetError
from normprobe.targets import TargetOptions, gguf, resolve

pytest.importorskip("gguf")
WIDTH, HIDDEN, WORDS = 32, 64, 40


def write(path: Path, without: str | None = None) -> dict[str, numpy.ndarray]:
    """A Llama with one block and float32 tensors, in GGUF's names; all of them, or `without` one."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    draw = numpy.random.default_rng(0)
    shapes = {
        "token_embd.weight": (WORDS, WIDTH),
        "output.weight": (WORDS, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_up.weight": (HIDDEN, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, HIDDEN),
    }
    tensors = {name: draw.standard_normal(shape).astype("float32") for name, shape in shapes.items() if name != without}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = write(tmp_path / "tiny.gguf")
    loaded = resolve(str(tmp_path / "tiny.gguf"))
    state = loaded.model.state_dict()
    for key, name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        assert torch.equal(state[key], torch.from_numpy(tensors[name]))
    assert (loaded.target.source, loaded.target.class_name) == ("gguf", "LlamaForCausalLM")
    assert loaded.missing == ()
    assert loaded.model(**loaded.inputs).logits.shape == (1, 16, WORDS)


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_missing_package_names_the_extra_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"no GGUF at all")
    find = gguf.importlib.util.find_spec
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(TargetError, match=rf"reading GGUF needs the package {missing}") as raised:
        resolve(str(path))
    assert "pip install 'normprobe[gguf]', in a clone pip install '.[gguf]'" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 something else"])
def test_other_file_under_that_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(TargetError, match="not a GGUF file"):
        resolve(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("keep", [12, 300, -2000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TargetError, match=r"tiny\.gguf: transformers cannot (read|load)"):
        resolve(str(path))


def test_meta_reads_the_configuration_alone(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    loaded = resolve(str(tmp_path / "tiny.gguf"), TargetOptions(meta=True))
    assert (loaded.target.device, loaded.target.class_name) == ("meta", "LlamaForCausalLM")


def test_the_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf as package

    opened: list[str] = []
    held: list[type] = []

    class Counting(package.GGUFReader):
        def __init__(self, path: str) -> None:
            opened.append(str(path))
            super().__init__(path)
            held.append(type(self.data))

    monkeypatch.setattr(package, "GGUFReader", Counting)
    write(tmp_path / "tiny.gguf")
    resolve(str(tmp_path / "tiny.gguf"))
    assert opened == [str(tmp_path / "tiny.gguf")]
    assert held == [numpy.ndarray]  # a memmap is slow to slice
    (tmp_path / "broken.gguf").write_bytes(gguf.MAGIC + b"0" * 64)
    with pytest.raises(TargetError, match="transformers cannot read this GGUF file"):
        resolve(str(tmp_path / "broken.gguf"))
    assert package.GGUFReader is Counting


def test_files_that_are_read_at_once_leave_the_reader_as_it_was() -> None:
    import gguf as package

    before, inside, leave = package.GGUFReader, Event(), Event()

    def other() -> None:
        with gguf._read_once():
            inside.set()
            leave.wait(10)

    thread = Thread(target=other)
    with gguf._read_once():
        thread.start()
        inside.wait(0.2)
    leave.set()
    thread.join()
    assert inside.is_set()
    assert package.GGUFReader is before


def test_smollm2(smollm2_loaded: Any) -> None:
    loaded = smollm2_loaded
    assert (loaded.target.class_name, loaded.target.dtype) == ("LlamaForCausalLM", "float32")
    assert loaded.target.parameters == 134_515_008
    assert loaded.missing == loaded.unexpected == ()
    assert loaded.tokenizer.decode(loaded.inputs["input_ids"][0]).startswith("The ferry left the small harbour")
    with torch.no_grad():
        loss = loaded.model(**loaded.inputs, labels=loaded.inputs["input_ids"]).loss
    assert loss.item() < 6.0  # ln of the vocabulary's 49,152 is 10.8: a model with wrong weights does no better
