"""normprobe and others that watch a forward: how each does it, and the numbers that several of them tell.

Numbers go by names that all use: `rms` (median over tokens) and `abs_max` of the stream after each block;
`logit_max`, `entropy`, `saturated` and `first_token` of each head of each layer, over all rows.

Dims: L layers, H heads, Q query rows, T keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.smollm import checkpoint

Numbers = dict[str, Any]  # name -> tensor of float64
SATURATED = 0.99


@dataclass(frozen=True)
class Watcher:
    """One way to watch a forward.

    Attributes:
        package: what has to be installed.
        attach: (model, ids) -> one watched forward; the model may be changed.
        numbers: of what that forward returned.
        tolerance: relative, of the numbers against normprobe's.
    """

    package: str
    attach: Callable[[Any, Any], Callable[[], Any]]
    numbers: Callable[[Any], Numbers] = lambda result: {}
    tolerance: float = 1e-5


def nothing(model: Any, ids: Any) -> Callable[[], Any]:
    """The second copy of the model, unwatched."""
    return lambda: model(input_ids=ids, use_cache=False)


def normprobe_signal(model: Any, ids: Any, exact: bool = False) -> Callable[[], Any]:
    """The residual streams and attention, as at the default level."""
    return _normprobe("measure_signal", model, ids, exact)


def normprobe_forward(model: Any, ids: Any) -> Callable[[], Any]:
    """All of the default level."""
    return _normprobe("measure_forward", model, ids)


def _normprobe(name: str, model: Any, ids: Any, exact: bool = False) -> Callable[[], Any]:
    import normprobe
    from normprobe.measures import forward

    inputs = {"input_ids": ids}
    anatomy = normprobe.probe(model, inputs, level="structure").anatomy
    run = getattr(forward, name)
    return lambda: run(model, inputs, anatomy, exact=exact, everywhere=False)[0]


def normprobe_numbers(measured: Any) -> Numbers:
    """All names, of a pass that took every row."""
    import torch

    (stream,) = measured.residual
    blocks = {state.block: state for state in stream.states}.values()  # the last of each block
    states = {"rms": [s.rms_median for s in blocks], "abs_max": [s.abs_max for s in blocks]}
    names = {"logit_max": "sampled_max", "entropy": "entropy", "saturated": "saturated", "first_token": "first_token"}
    heads = {
        name: [[getattr(head, field) for head in site.heads] for site in measured.attention]
        for name, field in names.items()
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in (states | heads).items()}


def output_attentions(model: Any, ids: Any) -> Callable[[], Any]:
    """transformers' own `output_attentions`, on its eager attention."""
    model.set_attn_implementation("eager")
    return lambda: model(input_ids=ids, use_cache=False, output_attentions=True).attentions


def attention_numbers(weights: Iterable[Any]) -> Numbers:
    """Of attention weights, [1, H, Q, T] a layer; causal."""
    import torch

    found: dict[str, list[Any]] = {"entropy": [], "saturated": [], "first_token": []}
    for layer in weights:
        p_HQT = layer[0].double()
        keys = torch.arange(2, p_HQT.shape[1] + 1, dtype=torch.float64)
        several = p_HQT[:, 1:]  # the first row has one key
        found["entropy"].append((torch.special.entr(several).sum(-1) / keys.log()).mean(-1))
        found["saturated"].append((several.amax(-1) > SATURATED).double().mean(-1))
        found["first_token"].append(p_HQT[..., 0].mean(-1))
    return {name: torch.stack(rows) for name, rows in found.items()}


def hidden_states(model: Any, ids: Any) -> Callable[[], Any]:
    """transformers' own `output_hidden_states`, with the RMS of each."""

    def run() -> Any:
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return [state.square().mean(-1).sqrt() for state in states]

    return run


def hidden_state_numbers(rms: Any) -> Numbers:
    """The first state is the embedding; the last is normalised."""
    return {"rms": _medians(rms[1:-1])}


def _medians(rms: Iterable[Any]) -> Any:
    import torch

    return torch.stack([each.double().flatten().quantile(0.5) for each in rms])


def nnsight_rms(model: Any, ids: Any) -> Callable[[], Any]:
    """nnsight, which saves the RMS of each block's output."""
    from nnsight import NNsight, save

    traced = NNsight(model)

    def run() -> Any:
        with traced.trace(input_ids=ids, use_cache=False):
            found: list[Any] = save(list())
            for layer in traced.model.layers:
                found.append(layer.output.square().mean(-1).sqrt())
        return found

    return run


def transformer_lens(model: Any, ids: Any) -> Callable[[], Any]:
    """TransformerLens, which keeps all of its hook points."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    file = checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    bridge = TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M", hf_model=model, tokenizer=tokenizer)
    return lambda: bridge.run_with_cache(ids)[1]


def transformer_lens_numbers(cache: Any) -> Numbers:
    """Of the residual stream after each block, the scores and the patterns."""
    import torch

    layers = range(len([name for name in cache if re.fullmatch(r"blocks\.\d+\.hook_resid_post", name)]))
    states = [cache[f"blocks.{i}.hook_resid_post"] for i in layers]
    scores = [cache[f"blocks.{i}.attn.hook_attn_scores"][0] for i in layers]
    return {
        "rms": _medians(state.double().square().mean(-1).sqrt() for state in states),
        "abs_max": torch.stack([state.abs().max() for state in states]).double(),
        "logit_max": torch.stack([each.amax((1, 2)) for each in scores]).double(),
        **attention_numbers(cache[f"blocks.{i}.attn.hook_pattern"] for i in layers),
    }


def debug_overflow(model: Any, ids: Any) -> Callable[[], Any]:
    """transformers' DebugUnderflowOverflow: |min| and |max| of every module's weights, inputs and outputs."""
    from transformers.debug_utils import DebugUnderflowOverflow

    debug: Any = DebugUnderflowOverflow(model, max_frames_to_save=10_000)

    def run() -> Any:
        debug.reset_saved_frames()
        model(input_ids=ids, use_cache=False)
        return debug.frames

    return run


def debug_overflow_numbers(frames: Iterable[str]) -> Numbers:
    """Of the outputs of the blocks; it writes three digits."""
    import torch

    blocks = [frame for frame in frames if re.search(r"^\s*model\.layers\.\d+ ", frame, re.MULTILINE)]
    found = [re.findall(r"(\S+) output\b", frame)[0] for frame in blocks]
    return {"abs_max": torch.tensor([float(text) for text in found], dtype=torch.float64)}


NORMPROBE = "normprobe, residual streams and attention"
WATCHERS = {
    NORMPROBE: Watcher("normprobe", normprobe_signal),
    "normprobe, and how the weights were drawn": Watcher("normprobe", normprobe_forward),
    "TransformerLens, run_with_cache": Watcher("transformer_lens", transformer_lens, transformer_lens_numbers),
    "transformers, output_attentions (eager)": Watcher("transformers", output_attentions, attention_numbers),
    "transformers, output_hidden_states and their RMS": Watcher("transformers", hidden_states, hidden_state_numbers),
    "transformers, DebugUnderflowOverflow": Watcher(
        "transformers", debug_overflow, debug_overflow_numbers, tolerance=6e-3
    ),
    "nnsight, RMS of the residual stream": Watcher("nnsight", nnsight_rms, lambda rms: {"rms": _medians(rms)}),
    "nothing (the second copy of the model)": Watcher("transformers", nothing),
}
