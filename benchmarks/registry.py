"""The models of each kind that transformers registers in its auto mappings."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "image-classifier": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "audio-encoder": (
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_CTC_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES",
    ),
}


@dataclass(frozen=True, order=True)
class Entry:
    """One registered model: the task's kind, transformers' model type, and the class."""

    kind: str
    model_type: str
    class_name: str

    @property
    def name(self) -> str:
        """Kind, model type and class in one word, as `--only` matches it."""
        return f"{self.kind}:{self.model_type}:{self.class_name}"


def registered(kind: str) -> list[Entry]:
    """Every (model type, class) of a kind, once each, in alphabetical order."""
    from transformers.models.auto import modeling_auto

    found = set()
    for mapping in KINDS[kind]:
        for model_type, classes in getattr(modeling_auto, mapping).items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found.add(Entry(kind, model_type, name))
    return sorted(found)
