"""Trains, scores, exports and samples a tiny model of a kind, and compares with a plain forward of each row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from causal_kinds import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.errors import NotSupported
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_dtensor.worker import DTensorPolicyWorker

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
ENGINE = "rlframework.generation.transformers_engine:TransformersEngine"
MODES = ("dynamic", "packed")
LENGTHS = (11, 7, 9, 3)
PROMPTS, NEW_TOKENS, STOP = (5, 4, 3, 2), 6, 2
TOLERANCE = 1e-5
EQUAL, REJECTED = "equal", "rejected"


def outcomes(kind: type[PretrainedConfig], folder: Path) -> dict[str, str]:
    """Return "equal", or why the kind is rejected, for each of `MODES` and for "generation".

    Raises an AssertionError where the worker computes something else than the model does row by row.
    """
    tiny_model(kind).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected, gradients = _oracle(model, _batch())
    found = {}
    for mode in MODES:
        try:
            worker = _worker(folder, mode)
        except NotSupported as error:
            found[mode] = str(error)
            continue
        try:
            _compare_training(worker, expected, gradients)
            found[mode] = EQUAL
            if "generation" not in found:
                _compare_export(worker, expected, folder / "exported")
                found["generation"] = _generation(worker, model)
        finally:
            worker.shutdown()
    return {"generation": found[MODES[0]], **found}


def _batch() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    real = torch.arange(max(LENGTHS)) < lengths[:, None]
    ids = torch.randint(3, 40, real.shape, generator=generator) * real
    masks = {"token_mask": real.float(), "sample_mask": torch.ones(len(LENGTHS))}
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, **masks})


def _worker(folder: Path, mode: str) -> DTensorPolicyWorker:
    config = {"model_name": str(folder), "batching": {"mode": mode, "tokens": 40}, "train_global_batch_size": 4}
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=[STOP])
    return DTensorPolicyWorker(config, TOKENIZER, generation=generation, generation_target=ENGINE)


def _oracle(model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities `[B, S]` of each row by itself, and the gradients of their mean."""
    logprobs = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, :length]
        scores = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        logprobs[row, 1:length] = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
    (-logprobs.sum() / (sum(LENGTHS) - len(LENGTHS))).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return logprobs.detach(), gradients


def _compare_training(worker: DTensorPolicyWorker, expected: Tensor, gradients: Mapping[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> tuple[float, bool]:
        weights = worker.engine.model.named_parameters()
        found.update({name: weight.grad.clone() for name, weight in weights if weight.grad is not None})
        return 0.0, True

    worker.engine.clip_and_step = keep  # type: ignore[method-assign]
    worker.train(_batch(), NLLLoss())
    assert found.keys() >= gradients.keys()
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    differences = torch.stack([(found[name] - gradient).norm() for name, gradient in gradients.items()])
    assert differences.norm() <= TOLERANCE * norm
    _assert_close(worker.get_logprobs(_batch())["logprobs"], expected)


def _compare_export(worker: DTensorPolicyWorker, expected: Tensor, folder: Path) -> None:
    worker.save_pretrained(str(folder))
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _assert_close(_oracle(again, _batch())[0], expected)


def _assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _generation(worker: DTensorPolicyWorker, model: Any) -> str:
    ids = _batch()["input_ids"][:, : max(PROMPTS)].clone()
    prompts = [ids[row, :length].clone() for row, length in enumerate(PROMPTS)]
    for row, length in enumerate(PROMPTS):
        ids[row, length:] = 0
    data = {"input_ids": ids, "input_lengths": torch.tensor(PROMPTS), "seeds": torch.arange(len(PROMPTS))}
    try:
        generated = worker.generate(BatchedDataDict(data), greedy=True)
    except NotSupported as error:
        return str(error)
    for row, prompt in enumerate(prompts):
        expected = _most_likely(model, prompt)
        start = len(prompt)
        assert generated["output_ids"][row, start : start + len(expected)].tolist() == expected
    return EQUAL


@torch.no_grad()
def _most_likely(model: Any, prompt: Tensor) -> list[int]:
    """The most likely next tokens, each by a forward of the whole row."""
    ids = prompt
    for _ in range(NEW_TOKENS):
        token = model(input_ids=ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat((ids, token[None]))
        if token == STOP:
            break
    return [int(token) for token in ids[len(prompt) :]]
