"""Every kind of causal language model is computed and saved as by a plain model, or rejected as on the dtensor backend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS
from kind_outcomes import EQUAL, MODES, TOKENIZER, Place, outcomes
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlframework.errors import NotSupported
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_deepspeed import environment
from rlframework_deepspeed.worker import DeepSpeedPolicyWorker

pytestmark = pytest.mark.slow


def gradients(worker: Any) -> dict[str, Tensor]:
    """The whole gradients of a worker, by the names of parameters. Collective."""
    shards, tensor = worker.engine._shards, worker.engine._tensor
    held = {id(parameter): part.reshape(-1) for parameter, part in shards.gradients()}
    return {
        name: tensor.join(shards.all_of(parameter, held.get(id(parameter))), tensor.partition(parameter))
        for name, parameter in worker.engine.model.named_parameters()
    }
