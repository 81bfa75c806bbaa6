"""DeepNorm's constants for the streams of a model."""

from __future__ import annotations

from collections.abc import Mapping

from normprobe.records import Anatomy, Stream
from normprobe.theory import DeepNormScale, deepnorm


def scales(anatomy: Anatomy) -> Mapping[int, DeepNormScale]:
    """α and β by stream: of an encoder-decoder where one of two streams attends to the other, else of a stack alone.

    Layers are the blocks that write to the stream. Source: Wang et al. 2022 (DeepNet), fig. 2.
    """
    layers = {i: depth(stream) for i, stream in enumerate(anatomy.streams)}
    decoders = [i for i, stream in enumerate(anatomy.streams) if attends_outside(stream)]
    encoders = [i for i in layers if i not in decoders]
    if len(decoders) == 1 and len(encoders) == 1:
        both = deepnorm("encoder-decoder", encoder_layers=layers[encoders[0]], decoder_layers=layers[decoders[0]])
        return {encoders[0]: both["encoder"], decoders[0]: both["decoder"]}
    return {i: deepnorm("encoder", encoder_layers=n)["encoder"] for i, n in layers.items()}


def depth(stream: Stream) -> int:
    """How many layers write to a stream."""
    return len({(branch.block, branch.layer) for branch in stream.branches})


def attends_outside(stream: Stream) -> bool:
    """Whether a branch attends to what comes from outside the stream, as a decoder's does."""
    return any(branch.kind == "cross_attention" for branch in stream.branches)
