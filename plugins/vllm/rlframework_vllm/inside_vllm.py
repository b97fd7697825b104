"""Parts of ours inside vLLM: prompts with images, as the driver's token ids and tensors, which vLLM does not process
again; and its sampler with the log-probabilities that the loss needs.

Imported where vLLM runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BatchFeature
from vllm import ModelRegistry
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.v1.sample.sampler import Sampler

from rlframework.generation.sdk import ImagePlace

_PROCESSING = "transformers.models.qwen2_vl.image_processing_{}qwen2_vl"


def take_tensors(architecture: str, most: int) -> dict[str, Any]:
    """Have vLLM's model of this name take processed images, so that it loads neither a tokenizer nor a processor.

    `most`: the features that one forward may need. vLLM divides prompts whose features exceed it. Returns the
    `EngineArgs` that this needs: vLLM would normalize the images once more.
    """
    if find_spec("torchvision") is None:  # vLLM imports only a function from here, which the other module has too
        sys.modules.setdefault(_PROCESSING.format(""), importlib.import_module(_PROCESSING.format("pil_")))
    model: Any = ModelRegistry.models[architecture].load_model_cls()
    own = model._processor_factory

    class Info(own.info):  # type: ignore[misc, name-defined]
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: object) -> dict[str, int]:
            return {"image": max(seq_len, most)}

    class Processor(own.processor):  # type: ignore[misc, name-defined]
        requires_tokenizer = False

    factory = replace(own, info=Info, processor=Processor)
    ModelRegistry.register_model(architecture, type(model.__name__, (model,), {"_processor_factory": factory}))
    return {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0, "skip_mm_profiling": True}


def engine_input(renderer: Any, ids: list[int], places: Sequence[ImagePlace], version: int) -> Any:
    """Return a prompt for vLLM. What its caches have of the prompt and of its images is told apart by `version`."""
    salt = str(version)
    if not places:
        return tokens_input(ids, cache_salt=salt)
    items = [_item(renderer.mm_processor, place) for place in places]
    names = [f"{salt} {place.media.key}" for place in places]
    ranges = [PlaceholderRange(place.start, place.tokens) for place in places]
    return mm_input(ids, MultiModalKwargsItems({"image": items}), {"image": names}, {"image": ranges}, cache_salt=salt)


def _item(processor: Any, place: ImagePlace) -> Any:
    """Return the tensors of an image as vLLM's own processor would return them."""
    inputs = BatchFeature(dict(place.media.inputs))
    (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, processor._get_mm_fields_config(inputs, {}))["image"]
    return item


GREEDY = 1e-5  # temperatures below are greedy in vLLM


class TemperatureSampler(Sampler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Returns log-probabilities at each request's temperature (greedy: at 1), before top-k and top-p.

    vLLM's modes have either the model's own, at temperature 1, or those after the truncation. Tokens of `never`, which
    stand for features of images, are not sampled.
    """

    never: Sequence[int] = ()

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample at temperature 1 from logits that are divided by the temperature."""
        given = sampling_metadata.temperature
        if given is not None and not sampling_metadata.all_greedy:
            greedy = given < GREEDY
            logits = logits.float() / torch.where(greedy, 1.0, given)[:, None]
            sampling_metadata = replace(sampling_metadata, temperature=torch.where(greedy, given, 1.0))
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def apply_logits_processors(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Also exclude the tokens of `never`."""
        for token in self.never:  # one at a time: a list of indices would be copied to the device each time
            logits[:, token] = -torch.inf
        return super().apply_logits_processors(logits, *args, **kwargs)


def install(worker: Any, never: Sequence[int]) -> None:
    """Give `worker` of vLLM this sampler."""
    worker.model_runner.sampler = TemperatureSampler("raw_logprobs")
    worker.model_runner.sampler.never = never
