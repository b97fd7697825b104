"""Rows of unequal length, of kinds that differ in what padding does to them, against whole forwards row by row.

A kind for each way to be wrong; the sweep over all kinds has a column for generation, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batched_engine import Batches
from causal_kinds import KINDS, tiny_model
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM

from rlframework.base.errors import NotSupported, RequestError
from rlframework.config.sections import GenerationConfig
from rlframework.generation.sampling import choose, row_uniforms
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import SamplingParams
from rlframework_transformers.engine import TransformersEngine
from rlframework_transformers.packed_rows import PackedRows
from rlframework_transformers.probing import row_forward
from rlframework_transformers.row_forward import EqualRows, PaddedRows, WholeRows

LENGTHS, NEW = (11, 4, 7, 2, 7), 8
STOPS, END = (5, 9, 17, 23), 1
WAYS = {
    **dict.fromkeys(("llama", "mistral", "gemma3_text"), PackedRows),
    **dict.fromkeys(("bloom", "mpt", "olmo_hybrid", "lfm3"), PaddedRows),
    **dict.fromkeys(("bart", "mamba", "roformer", "deepseek_v4"), EqualRows),
    **dict.fromkeys(("rwkv", "roberta", "minimax", "openai-gpt"), WholeRows),
}


def _prompts() -> list[list[int]]:
    ids = torch.randint(3, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    rows = [row.tolist() for row in ids.split(LENGTHS)]
    return [*rows[:4], rows[2]]  # one prompt twice


def _engine(model: Any, **settings: Any) -> Batches:
    tokenizer = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
    config = GenerationConfig(**{"max_new_tokens": NEW, "stop_token_ids": STOPS, **settings})
    engine = TransformersEngine(config, tokenizer, model_name="none", device="cpu", precision="float32")
    engine.attach(model, 0)
    return Batches(engine, config, frozenset((*config.stop_token_ids, END)), tokenizer.pad_token_id)


@torch.no_grad()
def _row_by_row(model: Any, prompt: list[int], seed: int, greedy: bool) -> tuple[list[int], Tensor]:
    """The completion, each token by a forward of the whole row, and its log-probabilities in the finished row."""
    ids, rule = torch.tensor(prompt), SamplingParams(0.0 if greedy else 1.0)
    for draw in row_uniforms(torch.tensor([seed]), NEW)[0]:
        logits = model(input_ids=ids[None], use_cache=False).logits[:, -1]
        ids = torch.cat((ids, choose(logits, draw[None], rule)[0]))
        if int(ids[-1]) in (*STOPS, END):
            break
    first, logits = len(prompt), model(input_ids=ids[None], use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1)[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
    return ids[first:].tolist(), logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", WAYS)
def test_rows_are_those_of_whole_forwards(kind: str, batch: Any, completions: Any) -> None:
    model, prompts = tiny_model(KINDS[kind]), _prompts()
    assert row_forward(model) is WAYS[kind]
    engine = _engine(model)
    for greedy in (True, False):
        output = engine.generate(batch(prompts), greedy=greedy)
        expected = [_row_by_row(model, prompt, seed, greedy) for seed, prompt in enumerate(prompts)]
        assert completions(output) == [tokens for tokens, _ in expected]
        for row, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, expected, strict=True)):
            found = output["logprobs"][row, len(prompt) : len(prompt) + len(tokens)]
            torch.testing.assert_close(found, logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_model_that_sees_later_tokens_is_rejected_when_it_is_attached() -> None:
    with pytest.raises(NotSupported, match=r"XLNetLMHeadModel.*depend on the tokens after it"):
        _engine(tiny_model(KINDS["xlnet"]))


@pytest.mark.slow
def test_no_row_crosses_the_limit_of_a_rotary_embedding_with_two_regimes(batch: Any, completions: Any) -> None:
    """Beyond 12 tokens all of a row are computed otherwise, so shorter prompts end there and longer ones go on."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    positions = {"max_position_embeddings": 48, "original_max_position_embeddings": 12, "rope_parameters": rope}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = Phi3ForCausalLM(Phi3Config(**sizes, **positions, **tokens, initializer_range=0.4)).eval()
    prompts = [list(range(3, 3 + length)) for length in (4, 13, 10, 16)]
    engine = _engine(model, stop_token_ids=())
    output = engine.generate(batch(prompts))
    assert output["unpadded_sequence_lengths"][:3:2].max() <= 12
    assert output["generation_lengths"][1] > 2
    for row, tokens_of_row in enumerate(completions(output)):
        first, ids = len(prompts[row]), torch.tensor([[*prompts[row], *tokens_of_row]])
        with torch.no_grad():
            full = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        expected = full[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
        found = output["logprobs"][row, first : ids.shape[1]]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RequestError, match=r"request .* has 12 tokens, but .* only 12 positions until its rotary"):
        engine.generate(batch([list(range(3, 15))]))
