"""The harness of the generation suite: tiny models, engines built as by a worker, and checks of their output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.harness import Harness
from rlframework.conformance.suites.plain_decoding import PlainDecoder, pearson

ALPHABET = "0123456789+= "
END, PLUS, EQUALS = 1, 12, 13
"""Token ids of the tokenizer's end token, `+` and `=`."""

PROMPTS = ([5], [3, 9, 4, 12, 6], [7, 2, 13] * 7, [14, 13], [8] * 11, [4, 12], [6, END], [END, 5, END], [10, 11, 2])
"""Ragged prompts, some containing an end token. Their greedy completions end at different steps, without near-ties."""

SPREAD = [4, 12]
"""A prompt followed by a flat distribution."""


@dataclass
class GenerationHarness(Harness):
    """Models are created once in `models`; the plain decoder has its own copy of the weights."""

    _decoders: dict[Path, PlainDecoder] = field(default_factory=dict)

    def tokenizer(self, pad: str | None = None) -> Any:
        """Return a tokenizer of one token per character; `pad` replaces its pad token (id 0)."""
        from rlframework.huggingface.tokenizer import character_tokenizer

        made = character_tokenizer(ALPHABET)
        if pad is not None:
            made.pad_token = pad
        return made

    def path(self, seed: int = 0) -> Path:
        """Return the directory of a 2-layer Llama with peaked distributions; another `seed` gives other weights."""
        from rlframework.huggingface.model_directories import make_llama

        path = self.models / f"generation_{seed}"
        if not path.exists():
            make_llama(path, self.tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, init_std=0.4, seed=seed)
        return path

    def plain(self, path: Path | None = None) -> PlainDecoder:
        """Return the plain decoder of the model at `path`."""
        path = path or self.path()
        if path not in self._decoders:
            self._decoders[path] = PlainDecoder(path)
        return self._decoders[path]

    def module(self, path: Path | None = None) -> Any:
        """Return the model as a trainer has it, in training mode."""
        from transformers import AutoModelForCausalLM

        from rlframework.huggingface.model_directories import quiet_transformers

        with quiet_transformers():
            module: Any = AutoModelForCausalLM.from_pretrained(path or self.path(), dtype=torch.float32)
        return module.to(self.device).train()

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Return the weights under the names that `save_pretrained` writes."""
        from safetensors.torch import load_file

        return {
            name: tensor.to(self.device) for name, tensor in load_file(self.path(seed) / "model.safetensors").items()
        }

    def bare_engine(self, *, path: Path | None = None, tokenizer: Any = None, **settings: Any) -> Any:
        """Build an engine without weights, as `PolicyWorkerBase` builds it."""
        from rlframework.config.sections import GenerationConfig

        config_model: Any = self.record.config_model or GenerationConfig
        config = config_model(**{"name": self.record.name, **self.section, **settings})
        place = {"model_name": str(path or self.path()), "device": self.device, "precision": "float32"}
        return self.load_class()(config, tokenizer or self.tokenizer(), **place)

    def engine(self, *, module: Any = None, path: Path | None = None, tokenizer: Any = None, **settings: Any) -> Any:
        """Build an engine and attach `module`, or a newly loaded one."""
        engine = self.bare_engine(path=path, tokenizer=tokenizer, **settings)
        engine.attach(self.module(path) if module is None else module)
        return engine

    def require_completions(
        self, what: str, output: Any, prompts: Sequence[list[int]], expected: list[list[int]]
    ) -> None:
        """Require the prompts, each followed by the expected completion."""
        self.equal(f"the prompts in the output ({what})", prompts_of(output), [list(prompt) for prompt in prompts])
        for row, (got, wanted) in enumerate(zip(completions(output), expected, strict=True)):
            self.equal(f"the completion of row {row}, prompt {prompts[row]} ({what})", got, wanted)

    def require_logprobs(self, what: str, output: Any, decoder: PlainDecoder, temperature: float) -> None:
        """Require the plain decoder's log-probabilities at `temperature`, and 0 on prompts and padding."""
        expected = torch.zeros(output["logprobs"].shape, dtype=torch.float64)
        for row, (prompt, completion) in enumerate(zip(prompts_of(output), completions(output), strict=True)):
            ids = prompt + completion
            expected[row, : len(ids)] = decoder.logprobs(ids, len(prompt), temperature)
        self.values(f"log-probabilities of the completions ({what})", output["logprobs"], expected)

    def require_same_rows(self, what: str, got: Any, expected: Any, rows: Sequence[int]) -> None:
        """Require row i of `got` to be row `rows[i]` of `expected`: equal tokens, log-probabilities up to rounding."""
        wanted = completions(expected)
        for row, (completion, other) in enumerate(zip(completions(got), rows, strict=True)):
            self.equal(f"the completion of the row that was row {other} ({what})", completion, wanted[other])
            end = int(got["unpadded_sequence_lengths"][row])
            place = f"log-probabilities of the row that was row {other} ({what})"
            self.values(place, got["logprobs"][row, :end], expected["logprobs"][other, :end])

    def require_frequencies(self, what: str, output: Any, shares: dict[tuple[int, ...], float]) -> None:
        """Require completion frequencies to fit `shares`, up to a deviation with probability 1e-6."""
        counts = Counter(tuple(completion) for completion in completions(output))
        statistic, bound = pearson(counts, shares)
        self.require(
            statistic <= bound, f"Pearson's statistic of {what} is within chance", got=statistic, expected=bound
        )


def rows_of(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None, padding: int = 3
) -> BatchedDataDict[Any]:
    """Return prompts as a batch, with seeds 0, 1, 2, ... by default. The padding is a regular token."""
    width = max(map(len, prompts))
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[*prompt, *[padding] * (width - len(prompt))] for prompt in prompts]),
            "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "seeds": torch.tensor(list(range(len(prompts))) if seeds is None else list(seeds), dtype=torch.int64),
        }
    )


def completions(output: Any) -> list[list[int]]:
    """Return the completion of each row according to the lengths."""
    ends, lengths = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [
        ids[end - count : end] for ids, end, count in zip(output["output_ids"].tolist(), ends, lengths, strict=True)
    ]


def prompts_of(output: Any) -> list[list[int]]:
    """Return the tokens before each row's completion."""
    ends, lengths = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [ids[: end - count] for ids, end, count in zip(output["output_ids"].tolist(), ends, lengths, strict=True)]
