"""Tasks of reasoning-gym by name, scored by their own `score_answer`.

Answers are scored in a process of their own, which can be killed. Some scorers would evaluate an answer as Python code;
see `safe_answer` for what they are given instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlframework.config.environments import DatasetConfig
from rlframework.config.episode_environments import ReasoningGymConfig
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.errors import ConfigError, UserError
from rlframework.interfaces.environment import Environment, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` on the answer (reasoning-gym 0.1.25)."""

FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers call `sympy.parse_expr`, which calls `eval`, on the answer."""

REFUSED = frozenset({"codeio"})
"""Tasks that run programs of their data."""

_FORMULA = re.compile(r"[\w\s+\-*/^()=,.]{1,500}")
_NAMES = r"(a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[Aa]bs|[A-Za-z])"


class ReasoningGymEnvironment(Environment):
    """The tasks `ReasoningGymConfig.task`: questions of one turn, each made from the seed and its number."""

    def __init__(self, config: ReasoningGymConfig, *, seed: int) -> None:
        """Create the data set. Raises `ConfigError` for an unknown task, and for arguments that it refuses."""
        self._config = config
        size = config.train_samples + config.validation_samples
        data = dataset_of(config.task, {**config.arguments, "seed": seed % 2**31, "size": size})
        self._samples: dict[Split, Sequence[Sample]] = _split(
            [self._sample(number, data[number]) for number in range(size)], config
        )
        scoring = DatasetConfig(path="", reward=SCORER, reward_timeout=config.reward_timeout, max_reward_failures=1.0)
        self._reward = OwnReward(scoring, SCORER)

    def samples(self, split: Split) -> Sequence[Sample]:
        """The questions of `split`; `metadata` has the task, and the entry as `score_answer` takes it."""
        return self._samples[split]

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Score the answers; `accuracy` is 1 for a score of at least 1. An answer that cannot be scored gets 0."""
        texts = VerifiableEnvironment.answers(samples, conversations)
        after = self._config.answer_after
        return self._reward.score(samples, [text.rpartition(after)[2] if after else text for text in texts])

    def shutdown(self) -> None:
        """End the process that scores."""
        self._reward.close()

    def _sample(self, number: int, entry: Mapping[str, Any]) -> Sample:
        messages = prompt_messages(self._config.system_prompt, entry["question"] + self._config.instruction)
        answer = str(entry["answer"] or "")
        task = self._config.task
        given = {"task": task, "arguments": dict(self._config.arguments), "entry": dict(entry)}
        return Sample(f"{task} {number}", messages, answer, self._config.answer_after + answer, given)


SCORER = "rlframework.environments.reasoning_gym:score"


def score(sample: Sample, completion: str) -> dict[str, float]:
    """Score one answer with the task's own scorer; what it gives is between 0 and 1."""
    given = sample.metadata
    answer = safe_answer(given["task"], completion.strip())
    if answer is None:
        return {"reward": 0.0, "accuracy": 0.0}
    data = dataset_of(given["task"], {**given["arguments"], "seed": 0, "size": 1})
    reward = float(data.score_answer(answer=answer, entry=given["entry"]))
    return {"reward": reward, "accuracy": float(reward >= 1.0)}


def safe_answer(task: str, answer: str) -> str | None:
    """Return `answer` if the scorer of `task` may be given it, else None, which is a wrong answer.

    Scorers that call `eval` are given Python literals alone, besides rows of digits, capital letters and underscores;
    those that parse formulas, formulas of numbers, single letters and the usual functions, without attributes.
    """
    if task in LITERALS:
        return answer if re.fullmatch(r"[0-9A-Z_\s]*", answer) or _is_literal(answer) else None
    if task in FORMULAS:
        words = re.findall(r"[^\W\d]\w*", answer)
        usual = all(re.fullmatch(_NAMES, word) for word in words)
        powers = re.findall(r"\*\*|\^", answer)
        short = len(powers) <= 20 and not re.search(r"\d{16}", answer)
        attribute = re.search(r"\.\s*[^\W\d]", answer)
        return answer if _FORMULA.fullmatch(answer) and usual and short and not attribute else None
    return answer


def dataset_of(task: str, arguments: Mapping[str, Any]) -> Any:
    """Create a data set. Raises `ConfigError` for an unknown task, and for arguments that it refuses."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "environment.name=reasoning_gym needs reasoning-gym: pip install 'rlframework-core[reasoning-gym]'"
        ) from error
    if task in REFUSED:
        raise ConfigError(f"environment.task={task!r} runs programs to score answers, and is not supported")
    if task not in DATASETS:
        raise ConfigError(
            f"environment.task={task!r} is no task of reasoning-gym; it has {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except Exception as error:
        raise ConfigError(
            f"reasoning-gym refused environment.task={task!r} with {dict(arguments)}: {type(error).__name__}: {error}"
        ) from error


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _split(samples: list[Sample], config: ReasoningGymConfig) -> dict[Split, Sequence[Sample]]:
    """The first samples are for validation; training leaves out those that ask the same."""
    held_out = samples[: config.validation_samples]
    asked = {sample.messages[-1]["content"] for sample in held_out}
    train = [sample for sample in samples[len(held_out) :] if sample.messages[-1]["content"] not in asked]
    if not train:
        raise UserError(
            f"environment.task={config.task!r} has so few distinct questions that none is left to train on; lower "
            "environment.validation_samples, or set environment.arguments"
        )
    return {"train": train, "validation": held_out}
