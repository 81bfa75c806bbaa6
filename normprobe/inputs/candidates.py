"""The arguments a model may want, by its forward's signature and its configuration's fields.

Dims of the shapes: rows, frames of a video, channels, height and width in pixels; rows, patches and the numbers in a
patch; rows, mel bins and spectrogram frames in any order; rows and samples of a waveform.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

from normprobe.inputs.face import Face
from normprobe.inputs.fields import AUDIO, VISION, field, number

Shape = tuple[int, ...]
IMAGE_SIZE = 224  # pixels a side, where the configuration names no size (a fully convolutional model)
SPECTROGRAM = 256  # frames, where the configuration names no number
SAMPLES = 16_000  # one second at 16 kHz, where the configuration names no rate
MEL_NAMES = (
    "num_mel_bins",
    "feature_projection_input_dim",
    "input_feat_per_channel",
    "feature_size",
    "input_dim",
)
IMAGE_NAMES = ("pixel_values", "pixel_values_videos")
AUDIO_NAMES = ("input_values", "input_features")
Candidate = tuple[dict[str, Tensor], str]


def candidates(face: Face, ids: Tensor | None, batch: int, seed: int) -> Iterator[Candidate]:
    """Sets of arguments, the one to prefer first, each with words for what is not ids.

    A language model is given text alone first, then text with an image or with audio; one over the codes of several
    code books also takes a row or a column for each.
    """
    if ids is not None and "input_ids" in face.parameters:
        yield {"input_ids": ids}, ""
        books = number(face.config, ("num_codebooks",))
        if books is not None and books > 1:
            words = f"the same for each of {books} code books"
            yield {"input_ids": ids.repeat_interleave(books, 0)}, words
            yield {"input_ids": ids[..., None].expand(*ids.shape, books)}, words
    names = [name for name in (*IMAGE_NAMES, *AUDIO_NAMES) if name in face.parameters]
    names.sort(key=lambda name: name != face.main)
    for with_ids in (False, True):
        if with_ids and (ids is None or "input_ids" not in face.parameters):
            continue
        for name in names:
            for shape, words in shapes(face, name, batch):
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                grid = _grid(face, batch) if len(shape) == 3 and name in IMAGE_NAMES else {}
                yield ({"input_ids": ids} if with_ids and ids is not None else {}) | {name: noise} | grid, words


def shapes(face: Face, name: str, batch: int) -> Iterator[tuple[Shape, str]]:
    """Shapes that the argument `name` may have, the likeliest first, each with a word for the noise."""
    if name in IMAGE_NAMES:
        yield from _image_shapes(face, name, batch)
    elif name == "input_values":
        yield from _waveform_shapes(face, batch)
    else:
        yield from _feature_shapes(face, batch)


def _grid(face: Face, batch: int) -> dict[str, Tensor]:
    """How many patches lie beside and below each other in images that come as rows of patches."""
    side = isqrt(number(face.config, ("num_patches",), VISION) or 0)
    given = {"spatial_shapes": torch.full((batch, 2), side), "pixel_attention_mask": torch.ones(batch, side**2).long()}
    return {name: value for name, value in given.items() if name in face.parameters}


def _image_shapes(face: Face, name: str, batch: int) -> Iterator[tuple[Shape, str]]:
    channels = number(face.config, ("num_channels", "in_channels", "in_chans"), VISION) or 3
    count, patch = (number(face.config, (name,), VISION) for name in ("num_patches", "patch_size"))
    if count is not None and patch is not None and "spatial_shapes" in face.parameters:
        yield (batch, isqrt(count) ** 2, channels * patch**2), f"seeded standard-normal noise of {count} image patches"
        return
    height, width, sized = image_size(face)
    words = f"seeded standard-normal image noise {channels}x{height}x{width}"
    words += "" if sized else " (the configuration names no size)"
    frames = number(face.config, ("num_frames", "frames_per_clip"), VISION)
    if frames is not None:
        yield (batch, frames, channels, height, width), f"{words}, {frames} frames"
    if name == "pixel_values":
        yield (batch, channels, height, width), words


def image_size(face: Face) -> tuple[int, int, bool]:
    """Height and width in pixels, and whether the configuration names them."""
    value = field(face.config, ("image_size", "input_size", "crop_size", "img_size"), VISION)
    pretrained = field(face.config, ("pretrained_cfg",), VISION)
    if value is None and isinstance(pretrained, dict):
        value = pretrained.get("input_size")
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, int) and value > 0:
        return value, value, True
    if isinstance(value, list | tuple) and len(value) >= 2 and all(isinstance(v, int) for v in value):
        return value[-2], value[-1], True
    return IMAGE_SIZE, IMAGE_SIZE, False


def _waveform_shapes(face: Face, batch: int) -> Iterator[tuple[Shape, str]]:
    mel = number(face.config, ("num_mel_bins",), AUDIO)
    length = number(face.config, ("max_length",), AUDIO)
    if mel is not None and length is not None:
        yield (batch, length, mel), f"seeded standard-normal spectrogram noise {length}x{mel}"
    samples = number(face.config, ("sampling_rate", "sample_rate"), AUDIO) or SAMPLES
    words = f"seeded standard-normal waveform noise, {samples} samples"
    yield (batch, samples), words
    channels = number(face.config, ("audio_channels", "num_channels"), AUDIO) or 1
    yield (batch, channels, samples), words


def _feature_shapes(face: Face, batch: int) -> Iterator[tuple[Shape, str]]:
    mels = [value for name in MEL_NAMES if (value := number(face.config, (name,), AUDIO)) is not None]
    positions = number(face.config, ("max_source_positions", "n_ctx"), AUDIO)
    lengths = [SPECTROGRAM] if positions is None else [SPECTROGRAM, 2 * positions, positions]
    for mel in mels:
        for length in lengths:
            words = f"seeded standard-normal spectrogram noise {mel} bins x {length} frames"
            yield (batch, mel, length), words
            yield (batch, length, mel), words
            yield (batch, 1, length, mel), words
