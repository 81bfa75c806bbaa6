"""Why errors and warnings on healthy models are deserved: read by `calibration`, which fails where one is missing."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One reason.

    Attributes:
        code, severity: of the findings that it explains.
        models: regular expression on group:model.
        why: what an expert would say of it; a sentence for the page.
        message: regular expression on the finding's message.
    """

    code: str
    severity: str
    models: str
    why: str
    message: str = ""


_GAINS = "^registered:(EfficientNet|MobileViT|MobileViTV2)For"
_VANISHED = "a consequence of its gains about 0 (NP109): the signal has vanished where this is measured"
_AUDIO = "^registered:(Parakeet|Canary|CohereAsr)For"
_SUBSAMPLED = (
    "drawn with a standard deviation of 0.02, the convolutions that subsample the features leave 1e-4 of them: "
    "the first norms get less than their eps"
)
_GEMMA4 = "^registered:Gemma4(Unified)?For"
_WIDE_HEADS = "full attention has heads of 512 features, normed queries and keys and a scale of 1: √512 at the start"
_CPM = "^registered:CpmAntFor"
_UNIT = "the configuration draws all weights, and the table of positions, with a standard deviation of 1"

REASONS: tuple[Reason, ...] = (
    # planted
    Reason("NP201", "error", "^demo:", "planted: the demo lacks its final norm"),
    Reason(
        "NP201",
        "error",
        "^truth:custom_(preln_nofinal|rms_input_dtype|lying_layernorm)$",
        "planted: built by hand as pre-norm blocks without a final norm",
    ),
    Reason(
        "NP201", "warning", "^truth:custom_residualstack_preln$", "planted: pre-norm blocks, a mean, and no final norm"
    ),
    Reason("NP101", "warning", "^truth:custom_rms_eps_outside$", "planted: eps of 1e-3 outside the root"),
    Reason("NP208", "warning", "^truth:custom_dead_norm$", "planted: a norm that the block does not call"),
    Reason("NP502", "warning", "^truth:custom_relu_mlp", "planted: nine layers drawn with half of ReLU's gain"),
    Reason("NP601", "warning", "^truth:custom_relu_mlp_xavier", "planted: Xavier's gain before ReLU, no norm"),
    # norms
    Reason(
        "NP101",
        "warning",
        "^registered:ZayaFor",
        "queries and keys are divided by a root that is clamped at 1.2e-7: a kernel with eps inside differs at small "
        "ones",
    ),
    Reason("NP103", "warning", _AUDIO, _SUBSAMPLED),
    Reason("NP103", "warning", "^registered:MobileViTFor", _VANISHED),
    Reason(
        "NP103",
        "warning",
        "^registered:HYV[34]For",
        "the configuration draws embeddings with a standard deviation of 0.006 and sets eps to 1e-5, a third of their "
        "square",
    ),
    Reason(
        "NP109",
        "warning",
        _GAINS,
        "the class draws the gains of its batch norms about 0, with a standard deviation of 0.02",
    ),
    Reason(
        "NP114",
        "warning",
        "(ConvNextV2For|hf_chameleon_qknorm)",
        "the rule that spares what has one axis misses its gains, which have two or four",
    ),
    Reason(
        "NP115",
        "warning",
        "^trained:SmolLM2-135M in bfloat16$",
        "steps of 1e-3 are lost in gains of 1 and more in bfloat16",
    ),
    # placement
    Reason(
        "NP201",
        "warning",
        "^registered:(CLIP|MetaClip2|DonutSwin)ForImage",
        "the classifier reads the mean of the raw patches: the class token alone has a norm, or nothing has",
    ),
    Reason(
        "NP201",
        "warning",
        "^registered:PerceiverForImage",
        "the decoder is one block whose sum goes to the last layer without a norm, as published",
    ),
    Reason(
        "NP205",
        "warning",
        "^deep:torch.nn.TransformerEncoder, 48 post",
        "96 writes, twice those of BERT-large, unscaled",
    ),
    Reason(
        "NP207",
        "warning",
        "^truth:bloom/residual_post_ln$",
        "the norm of the first block reads what the norm of the embeddings made, and nothing else does",
    ),
    Reason(
        "NP212",
        "warning",
        "^registered:(BigBirdPegasus|Luke|Pop2Piano)For",
        "the configuration says tie_word_embeddings, and head and embedding are two tensors",
    ),
    Reason(
        "NP212",
        "warning",
        "^registered:MoshiFor",
        "the configuration states a sliding_window that only one of its attention implementations applies",
    ),
    # signal
    Reason(
        "NP301",
        "warning",
        "^deep:torch.nn.TransformerEncoder, 12 pre",
        "nn.TransformerEncoder copies one layer: all start with the same weights, and their writes point the same way",
    ),
    Reason("NP305", "warning", "^registered:MobileViTFor", _VANISHED),
    Reason(
        "NP306",
        "warning",
        "^registered:Dots3NoteFor",
        "the small configuration leaves sliding layers at 64 heads of 128, whose writer sums over 128 times as many "
        "inputs",
    ),
    Reason(
        "NP308",
        "warning",
        "^deep:torch.nn.TransformerEncoder, 48 post",
        "uniform attention averages the tokens 48 times, and each norm takes half of the skip",
    ),
    Reason("NP308", "warning", _AUDIO, "of features smaller than eps the bias that all tokens share is left"),
    Reason(
        "NP308",
        "warning",
        "^registered:LevitFor",
        "attention that shrinks the map has no skip: at the start it averages",
    ),
    # attention
    Reason(
        "NP401",
        "warning",
        "^trained:all-MiniLM-L6-v2$",
        "logits of its first layer come from large query and key biases; softmax sees their differences alone",
    ),
    *(Reason(code, "warning", _GEMMA4, _WIDE_HEADS) for code in ("NP401", "NP402", "NP403", "NP404")),
    *(Reason(code, "warning", _CPM, _UNIT) for code in ("NP401", "NP402", "NP403")),
    Reason(
        "NP404", "warning", "^registered:CvtFor", "its scale is that of the full width, where heads have 64 features"
    ),
    # initialisation
    Reason(
        "NP605",
        "warning",
        "^registered:Nemotron3DiarizationFor",
        "its upsampler starts as repetition, eight times the identity: the places of the copies tell them apart",
    ),
)
