"""The SDK of generation engines: everything that an engine imports of core besides its configuration and its record.

An engine is a `rlframework.interfaces.generation.GenerationEngine`; `ServingEngine` and `SleepingEngine` have what most
of them share. The names are versioned with the plugin API, as those of `rlframework.engine`.
"""

# ruff: noqa: F401 - the names are exported
# mypy: implicit-reexport
from __future__ import annotations

from typing import TYPE_CHECKING

from rlframework.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from rlframework.generation.engine_model import AdaptedWeights, EngineModel, cache_argument, require_fit
    from rlframework.generation.media import ImageEncoder, ImagePlace, Media
    from rlframework.generation.packed_linears import PackedLinears, shows_columns
    from rlframework.generation.requests import RowLimits, ServingLimits, check_requests
    from rlframework.generation.sampling import SAMPLED_ELEMENTS, choose, row_uniforms
    from rlframework.generation.serving import Collected, Served, ServingEngine, SleepingEngine
    from rlframework.huggingface.model_directories import first_size, read_config
    from rlframework.huggingface.vision_models import image_token, never_sampled
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
    from rlframework.models.varlen import PLAIN, Scores
    from rlframework.policy.head.logprobs import scaled_logits
    from rlframework.weight_sync.buffers import Slot, WeightInfo
    from rlframework.weight_sync.receiver import Held, ReceivesWeights, WeightSink
    from rlframework.weight_sync.staged import Source, StagedWeights

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
