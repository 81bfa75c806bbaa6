"""Which class of transformers stands for a configuration, by transformers' own registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from normprobe.errors import TargetError
from normprobe.structure.automatic import automatic
from normprobe.structure.field import FIELD

LANGUAGE = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText")
SPEECH = ("SpeechSeq2Seq", "CTC", "AudioClassification")
VISION = ("ImageClassification", "SemanticSegmentation", "ObjectDetection", "VideoClassification")
SEQ2SEQ = ("Seq2SeqLM", "SpeechSeq2Seq")


def model_class(config: Any) -> type[Any]:
    """The class for `config`: the one it names, else a head by the auto mappings, else the bare one; where it lists the
    changes of a patched checkpoint, the class that is built with them.

    Without a named class, a configuration of an encoder-decoder gets its sequence-to-sequence head; one with
    `is_decoder` false gets its masked-language-model head where it has one.

    Raises:
        TargetError: transformers has no model for this configuration.
    """
    if getattr(config, FIELD, None) is not None:
        from normprobe.structure.modelling import patched, recorded_base

        return patched(recorded_base(config))
    named = _named_class(config)
    if named is not None:
        return named
    for auto in _auto_classes(config):
        found = _mapped(auto, config)
        if found is not None:
            return found
    raise TargetError(
        f"transformers has no model for the configuration {type(config).__name__}",
        hint="a factory (file.py:function) that returns the model",
    )


def _named_class(config: Any) -> type[Any] | None:
    """The first of `config.architectures` that transformers holds as a model for this configuration."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model and _takes(found, config):
            return found
    return None


def _takes(found: Any, config: Any) -> bool:
    """Whether the class is made for this configuration, and not for a part of it such as its text model."""
    wanted = getattr(found, "config_class", None)
    return wanted is None or isinstance(config, wanted)


def _auto_classes(config: Any) -> list[Any]:
    import transformers

    tasks = [*LANGUAGE, *SPEECH, *VISION]
    if getattr(config, "is_encoder_decoder", False):
        tasks = [*SEQ2SEQ, *tasks]
    elif getattr(config, "is_decoder", None) is False:
        tasks = ["MaskedLM", *tasks]
    others = automatic("AutoModelFor")
    names = [*(f"AutoModelFor{task}" for task in tasks), "AutoModel", *others]
    return [getattr(transformers, name) for name in names if hasattr(transformers, name)]


def _mapped(auto: Any, config: Any) -> type[Any] | None:
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    classes = found if isinstance(found, tuple | list) else (found,)
    return next((chosen for chosen in classes if _takes(chosen, config)), None)


def builder(config: Any, trust: bool) -> Callable[[Any], Any]:
    """What builds a model of `config` with fresh weights; code that came with it only where it is trusted."""
    if trust and getattr(config, "auto_map", None) and getattr(config, FIELD, None) is None:
        auto = auto_with_code(config)
        return lambda given: auto.from_config(given, trust_remote_code=True)
    return model_class(config)


def class_with_code(config: Any, folder: Path) -> type[Any]:
    """The model class that `config.auto_map` names, by running the code in `folder`.

    Raises:
        TargetError: auto_map names code for no model, or the code does not run.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = config.auto_map[auto_with_code(config).__name__]
    try:
        found: type[Any] = get_class_from_dynamic_module(name, folder, local_files_only=True)
    except Exception as error:  # foreign code may fail in any way; the reason is shown
        raise TargetError(f"{folder}: no {name}", found=f"{type(error).__name__}: {error}") from error
    return found


def auto_with_code(config: Any) -> Any:
    """The auto class of transformers that `config.auto_map` names a class for, language models first.

    Raises:
        TargetError: auto_map names code for no model.
    """
    import transformers

    named = dict(config.auto_map)
    order = [f"AutoModelFor{task}" for task in (*LANGUAGE, *SPEECH, *VISION)]
    for name in [*order, "AutoModel", *named]:
        if name in named and name.startswith("AutoModel") and hasattr(transformers, name):
            return getattr(transformers, name)
    raise TargetError("auto_map names no model", expected="AutoModel or AutoModelFor…", found=", ".join(named))
