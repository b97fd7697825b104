"""The SDK of generation engines: everything that an engine imports of core besides its configuration and its record.

An engine is a `rlframework.interfaces.generation.GenerationEngine`; `ServingEngine` and `SleepingEngine` have what most
of them share. The names are versioned with the plugin API, as those of `rlframework.engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from rlframework.generation.engine_model import AdaptedWeights, EngineModel, cache_argument, require_fit
    from rlframework.generation.engine_software import SleepingEngine
    from rlframework.generation.media import ImageEncoder, ImagePlace, Media
    from rlframework.generation.packed_linears import PackedLinears, shows_columns
    from rlframework.generation.requests import RowLimits, ServingLimits, check_requests
    from rlframework.generation.sampling import SAMPLED_ELEMENTS, choose, row_uniforms
    from rlframework.generation.serving import Collected, Served, ServingEngine
    from rlframework.huggingface.image_processor import image_token, never_sampled
    from rlframework.huggingface.model_directories import first_size, read_config
    from rlframework.interfaces.generation import (
        FinishReason,
        GenerationRequest,
        GenerationResult,
        SamplingParams,
        Tag,
        WeightReport,
        WeightSpan,
    )
    from rlframework.models.attention import RowLayout, Segments, attention, register
    from rlframework.models.probing import tiny_model
    from rlframework.models.rotary import length_dependent
    from rlframework.models.scores import PLAIN, Scores
    from rlframework.policy.head.logprobs import scaled_logits
    from rlframework.weight_sync.buffers import Slot, WeightInfo
    from rlframework.weight_sync.receiver import Held, ReceivesWeights, WeightSink
    from rlframework.weight_sync.staged import Source, StagedWeights

__all__ = [
    "PLAIN",
    "SAMPLED_ELEMENTS",
    "AdaptedWeights",
    "Collected",
    "EngineModel",
    "FinishReason",
    "GenerationRequest",
    "GenerationResult",
    "Held",
    "ImageEncoder",
    "ImagePlace",
    "Media",
    "PackedLinears",
    "ReceivesWeights",
    "RowLayout",
    "RowLimits",
    "SamplingParams",
    "Scores",
    "Segments",
    "Served",
    "ServingEngine",
    "ServingLimits",
    "SleepingEngine",
    "Slot",
    "Source",
    "StagedWeights",
    "Tag",
    "WeightInfo",
    "WeightReport",
    "WeightSink",
    "WeightSpan",
    "attention",
    "cache_argument",
    "check_requests",
    "choose",
    "first_size",
    "image_token",
    "length_dependent",
    "never_sampled",
    "read_config",
    "register",
    "require_fit",
    "row_uniforms",
    "scaled_logits",
    "shows_columns",
    "tiny_model",
]

_MODULES = {
    "PLAIN": "rlframework.models.scores",
    "SAMPLED_ELEMENTS": "rlframework.generation.sampling",
    "AdaptedWeights": "rlframework.generation.engine_model",
    "Collected": "rlframework.generation.serving",
    "EngineModel": "rlframework.generation.engine_model",
    "FinishReason": "rlframework.interfaces.generation",
    "GenerationRequest": "rlframework.interfaces.generation",
    "GenerationResult": "rlframework.interfaces.generation",
    "Held": "rlframework.weight_sync.receiver",
    "ImageEncoder": "rlframework.generation.media",
    "ImagePlace": "rlframework.generation.media",
    "Media": "rlframework.generation.media",
    "PackedLinears": "rlframework.generation.packed_linears",
    "ReceivesWeights": "rlframework.weight_sync.receiver",
    "RowLayout": "rlframework.models.attention",
    "RowLimits": "rlframework.generation.requests",
    "SamplingParams": "rlframework.interfaces.generation",
    "Scores": "rlframework.models.scores",
    "Segments": "rlframework.models.attention",
    "Served": "rlframework.generation.serving",
    "ServingEngine": "rlframework.generation.serving",
    "ServingLimits": "rlframework.generation.requests",
    "SleepingEngine": "rlframework.generation.engine_software",
    "Slot": "rlframework.weight_sync.buffers",
    "Source": "rlframework.weight_sync.staged",
    "StagedWeights": "rlframework.weight_sync.staged",
    "Tag": "rlframework.interfaces.generation",
    "WeightInfo": "rlframework.weight_sync.buffers",
    "WeightReport": "rlframework.interfaces.generation",
    "WeightSink": "rlframework.weight_sync.receiver",
    "WeightSpan": "rlframework.interfaces.generation",
    "attention": "rlframework.models.attention",
    "cache_argument": "rlframework.generation.engine_model",
    "check_requests": "rlframework.generation.requests",
    "choose": "rlframework.generation.sampling",
    "first_size": "rlframework.huggingface.model_directories",
    "image_token": "rlframework.huggingface.image_processor",
    "length_dependent": "rlframework.models.rotary",
    "never_sampled": "rlframework.huggingface.image_processor",
    "read_config": "rlframework.huggingface.model_directories",
    "register": "rlframework.models.attention",
    "require_fit": "rlframework.generation.engine_model",
    "row_uniforms": "rlframework.generation.sampling",
    "scaled_logits": "rlframework.policy.head.logprobs",
    "shows_columns": "rlframework.generation.packed_linears",
    "tiny_model": "rlframework.models.probing",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
