"""Model families besides Llama: log-probabilities match plain transformers, or the model is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from rlframework.algorithms.losses import NLLLoss
from rlframework.base.errors import NotSupported
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_dtensor.worker import DTensorPolicyWorker

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = {**SIZES, "sliding_window": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "mistral, sliding window": ("Mistral", WINDOW),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt, dropout": ("OPT", {"hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 4, "word_embed_proj_dim": 32,
                             "dropout": 0.3, "layerdrop": 0.3, "attention_dropout": 0.3}),
    "bloom, no packing": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "llama 4, attention in chunks": (
        "Llama4Text", {**SIZES, "head_dim": 8, "intermediate_size_mlp": 32, "moe_layers": [], "attention_chunk_size": 4}
    ),
    "phi, head with a bias": ("Phi", {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}),
}  # fmt: skip


def save_model(path: Any, family: str, sizes: dict[str, Any]) -> Any:
    tokens = {"vocab_size": len(TOKENIZER), "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    common = {**tokens, "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(**{**common, **sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return model.eval()


def worker(path: Any, mode: str) -> DTensorPolicyWorker:
    config = {"model_name": str(path), "train_global_batch_size": 8, "batching": {"mode": mode, "tokens": 40}}
    return DTensorPolicyWorker(config, TOKENIZER)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_and_loss_match_transformers(tmp_path, batch, kind):
    plain = save_model(tmp_path, *MODELS[kind])
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.no_grad():
        logits = plain(input_ids=ids, attention_mask=real.long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    expected = torch.nn.functional.pad(chosen, (1, 0)) * real
    made = worker(tmp_path, "auto")
    assert made.get_info()["batching"] == ("dynamic" if "no packing" in kind else "packed")
    torch.testing.assert_close(made.get_logprobs(batch)["logprobs"], expected, rtol=1e-5, atol=1e-5)
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    loss = -(expected[:, 1:] * mask).sum() / mask.sum()
    assert made.train(batch, NLLLoss())["global_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    made.shutdown()


def test_packing_is_rejected_if_sequences_would_mix(tmp_path):
    save_model(tmp_path, *MODELS["bloom, no packing"])
    with pytest.raises(NotSupported, match=r"BloomForCausalLM.*policy\.batching\.mode to dynamic"):
        worker(tmp_path, "packed")
