"""Parts with an engine that answers from a script, through the real driver, client and thread; a reward model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_episodes import END, Game, ScriptedEngine

from rlframework.generation.driver import Generation
from rlframework.huggingface.tokenizer import load_tokenizer


@pytest.fixture
def make_parts(run_config: Any):
    """`make_parts(kind, answer, *overrides)`: parts with a scripted engine, which is `parts.engine`."""

    def make(kind: Any, answer: Any = None, *overrides: str) -> Any:
        config = run_config("grpo", "generation.max_new_tokens=8", *overrides)
        tokenizer = load_tokenizer(config.policy.model_name)
        engine = ScriptedEngine(answer or (lambda request: [5 + request.seed % 7, END]))
        policy: Any = SimpleNamespace(config=config)
        generation = Generation(policy, tokenizer, [engine])
        generation.finish_generation = lambda: True  # type: ignore[method-assign]  # the engine has no worker
        return SimpleNamespace(
            config=config,
            tokenizer=tokenizer,
            generation=generation,
            environment=Game(kind),
            engine=engine,
            models={},
            images=None,
            timeline=None,
        )

    return make


@pytest.fixture(scope="session")
def reward_model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the tiny Llama with a random head of scores."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    load_tokenizer(str(tiny_llama)).save_pretrained(folder)
    return folder
