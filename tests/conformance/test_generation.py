"""The embedded generation engine and a plain one pass the suite, and the suite catches every mutant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance import GenerationEngineSuite
from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.proof import MutantProof
from rlframework.errors import BatchError, ConfigError, UserError
from rlframework.plugins.manager import create_manager
from rlframework.weight_sync.receiver import ReceivesWeights

pytestmark = pytest.mark.slow


class TestGenerationEngine(GenerationEngineSuite):
    backend = "transformers"


class PlainEngine(ReceivesWeights):
    """Written from the interface alone: row by row, no cache, another random number generator."""

    def __init__(self, config, tokenizer, *, model_name, device, precision):
        known = tokenizer.get_vocab()
        if bad := [stop for stop in config.stop_strings if stop not in known]:
            raise ConfigError(f"stop_strings {bad} are no tokens")
        if bad := [stop for stop in config.stop_token_ids if not 0 <= stop < len(tokenizer)]:
            raise ConfigError(f"stop_token_ids {bad} are no tokens")
        self.refit_device, self.refit_deadline = torch.device(device), config.refit.deadline
        self.config, self.model_name, self.model, self.pad = config, model_name, None, tokenizer.pad_token_id
        self.ends = {tokenizer.eos_token_id, *config.stop_token_ids, *(known[stop] for stop in config.stop_strings)}

    def attach(self, model: Any) -> None:
        self.model = model

    def load_weights(self, weights: Any) -> None:
        given = {name: tensor.clone() for name, tensor in weights}
        with safe_open(f"{self.model_name}/model.safetensors", "pt") as saved:
            if missing := set(saved.keys()) - set(given):
                raise UserError(f"weights are missing: {sorted(missing)}")
        self.model = AutoModelForCausalLM.from_pretrained(self.model_name)
        self.model.load_state_dict(given, strict=False)
        self.model.tie_weights()

    @torch.no_grad()
    def generate(self, data: Any, greedy: bool = False) -> Any:
        self.require_weights()
        if self.model is None:
            raise UserError("there are no weights")
        if "seeds" not in data or not bool((data["input_lengths"] > 0).all()):
            raise BatchError(f"seeds must be there, and input_lengths above 0; got {dict(data)}")
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        self.seen: dict[tuple[int, ...], Any] = {}
        done = [self.complete(ids[:n].tolist(), seed, greedy) for ids, n, seed in self.rows(data)]
        for part, mode in modes:
            part.training = mode
        prompts = data["input_lengths"]
        lengths = torch.tensor([len(logprobs) for _, logprobs, _ in done])
        output = torch.full((len(done), int((prompts + lengths).max())), self.pad)
        scores = torch.zeros(output.shape)
        for row, (ids, logprobs, _) in enumerate(done):
            output[row, : len(ids)] = torch.tensor(ids)
            scores[row, len(ids) - len(logprobs) : len(ids)] = torch.tensor(logprobs)
        return BatchedDataDict(
            {
                "output_ids": output,
                "logprobs": scores,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": prompts + lengths,
                "truncated": torch.tensor([truncated for _, _, truncated in done]),
            }
        )

    def rows(self, data: Any) -> Any:
        return zip(data["input_ids"], data["input_lengths"].tolist(), data["seeds"].tolist(), strict=True)

    def complete(self, prompt: list[int], seed: int, greedy: bool) -> tuple[list[int], list[float], bool]:
        greedy = greedy or self.config.temperature == 0
        own = self.model.generation_config.eos_token_id
        ends = self.ends | set(own if isinstance(own, list) else [own])
        dice = np.random.default_rng(seed % 2**64)
        ids, logprobs = list(prompt), []
        while len(logprobs) < self.config.max_new_tokens:
            logs = self.next(tuple(ids), 1.0 if greedy else self.config.temperature)
            token = int(logs.argmax()) if greedy else self.draw(logs, dice.random())
            ids.append(token)
            logprobs.append(float(logs[token]))
            if token in ends:
                return ids, logprobs, False
        return ids, logprobs, True

    def next(self, ids: tuple[int, ...], temperature: float) -> Any:
        if ids not in self.seen:
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            self.seen[ids] = torch.log_softmax(logits.double() / temperature, -1)
        return self.seen[ids]

    def draw(self, logs: Any, chance: float) -> int:
        shares, tokens = logs.exp().sort(descending=True)
        shares = shares[: self.config.top_k] / shares[: self.config.top_k].sum()
        kept = shares[: int((shares.cumsum(0) < self.config.top_p).sum()) + 1]
        return int(tokens[min(int((kept.cumsum(0) <= chance * kept.sum()).sum()), len(kept) - 1)])


@pytest.mark.parametrize("test", GenerationEngineSuite.tests())
def test_a_plain_engine_passes(test: str, tmp_path: Path, conformance_models: Path) -> None:
    """The suite requires what the interface specifies, not how the core implements it."""
    manager = create_manager()
    record = manager.select("generation_engine", "transformers").record
    where = {"manager": manager, "device": "cpu", "folder": tmp_path, "models": conformance_models}
    getattr(GenerationEngineSuite(), test)(
        GenerationEngineSuite.open_harness(record, Layout(), **where, target=PlainEngine)
    )


class TestMutants(MutantProof):
    kind = "generation_engine"
    backend = "transformers"
