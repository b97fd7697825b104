"""Reward and value models of vision-language kinds: transformers has a class with such a head for few of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification

from rlframework.huggingface.vision_models import scoring_architecture


def scoring_class(config: Any) -> Any | None:
    """Return a class of models of `config` with a head that gives a number for each token, `score.weight`.

    It is made of the parts of transformers, with the interface of its auto classes. None if `config` is not that of a
    vision-language model, or transformers has such a class.
    """
    if type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    language: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return None if language is None else _class_beside(language, scoring_architecture(config))


@cache
def _class_beside(language: type[Any], name: str) -> Any:
    """Return the class `name` beside the class `language`, with the same base."""
    above = next(kind for kind in language.__mro__ if transformers.PreTrainedModel in kind.__bases__)
    renamed = get_checkpoint_conversion_mapping(language.__name__)
    if renamed is not None:  # how weights are called in files depends on the name of the class
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    return type(name, (_Scoring, above), {"__module__": above.__module__})  # else transformers renames nothing


class _Scoring(GenericForSequenceClassification):
    @classmethod
    def from_config(cls, config: Any, *, trust_remote_code: bool = False, **keys: Any) -> Any:
        """Return a model with random weights, as `from_config` of the auto classes does."""
        return cls._from_config(config, **keys)  # type: ignore[attr-defined]
