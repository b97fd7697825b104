"""Every kind of causal language model is supported, or rejected by its configuration before any weights are read."""

from __future__ import annotations

import json

import pytest
import torch
from causal_kinds import KINDS
from transformers import MixtralConfig, Qwen3MoeConfig

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.models.loading import load_config
from rlframework_megatron.architectures import ARCHITECTURES
from rlframework_megatron.config import unsupported
from rlframework_megatron.model import _pad
from rlframework_megatron.settings import require_same_function

NO_DEFAULT = {"gemma4_assistant", "gemma4_unified_assistant"}
"""Kinds whose configuration transformers rejects if nothing is given."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return what the driver and the workers say of each kind, None if they accept it: `{kind: (driver, workers)}`."""
    found = {}
    for kind in KINDS.keys() - NO_DEFAULT:
        folder = tmp_path_factory.mktemp(kind)
        model = {"model_type": kind}  # and the defaults of its configuration's class, with all its parts
        (folder / "config.json").write_text(json.dumps(model))
        messages = list(unsupported(model))
        try:
            require_same_function(load_config(PolicyConfig(model_name=str(folder))))
            workers = None
        except NotSupported as error:
            workers = str(error)
        found[kind] = (" ".join(messages) or None, workers)
    return found


@pytest.mark.slow
def test_each_kind_is_supported_or_rejected_by_its_name(outcomes):
    assert len(outcomes) > 150
    assert {kind for kind, said in outcomes.items() if said == (None, None)} == set(ARCHITECTURES)
    for kind, (driver, workers) in outcomes.items():
        if kind not in ARCHITECTURES:
            assert f"cannot convert {kind!r} models" in driver
            # the second: no backend trains it
            here = f"of a {kind!r} model" in workers and workers.endswith("Set policy.backend to dtensor")
            assert here or workers.startswith(f"a {kind} model cannot be trained: ")


@pytest.mark.parametrize(
    "config", [Qwen3MoeConfig(norm_topk_prob=True, num_experts_per_tok=1), MixtralConfig(num_experts_per_tok=1)]
)
def test_routers_that_choose_one_expert_without_a_gradient_are_rejected(config):
    with pytest.raises(NotSupported, match="choose one expert"):
        require_same_function(config)
    require_same_function(Qwen3MoeConfig(norm_topk_prob=False, num_experts_per_tok=1))


@pytest.mark.parametrize("token", [None, 3, -1])
def test_the_token_without_a_gradient_is_that_of_torch(token):
    config = Qwen3MoeConfig(vocab_size=7, pad_token_id=token)
    assert _pad(config) == torch.nn.Embedding(7, 2, padding_idx=token).padding_idx
