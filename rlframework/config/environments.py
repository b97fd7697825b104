"""The sections of core's own environments: `environment: {name: addition | gsm8k | dataset, ...}`."""

import string
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rlframework.config.base import Section
from rlframework.config.sections import EnvironmentConfig

MAX_TERMS = len(string.ascii_lowercase)


class AdditionConfig(EnvironmentConfig):
    """Sums of whole numbers, made from the seed. A task is held out for validation in every order of its terms."""

    name: str = Field("addition", description="sums of whole numbers")
    digits: Annotated[int, Field(ge=1, le=9)] = Field(2, description="most digits of a term: 2 means 0 to 99")
    operands: tuple[int, int] | None = Field(None, description="smallest and largest term, instead of `digits`")
    terms: Annotated[int, Field(ge=2, le=MAX_TERMS)] = Field(2, description="numbers that are added")
    train_samples: PositiveInt = Field(8192, description="at most this many different tasks to train on")
    validation_samples: PositiveInt | None = Field(
        None, description="different tasks held out; none: a tenth of what there is, at most 256"
    )
    prompt: str = Field("{expression}=", description="fields: {expression} (12+34), or {a}, {b}, ... for the terms")
    answer: Literal["exact", "first_integer", "last_integer"] = Field(
        "exact", description="what is compared: the whole answer without spaces around it, or an integer in it"
    )

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest term."""
        return self.operands if self.operands is not None else (0, 10**self.digits - 1)

    @model_validator(mode="after")
    def _operands_in_order(self) -> Self:
        low, high = self.bounds
        if not 0 <= low <= high:
            raise ValueError(f"operands must be [smallest, largest] with 0 <= smallest <= largest, not [{low}, {high}]")
        return self

    @model_validator(mode="after")
    def _prompt_names_all_terms(self) -> Self:
        letters = set(string.ascii_lowercase[: self.terms])
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        except ValueError as error:
            raise ValueError(f"prompt {self.prompt!r} is no template: {error}; write {{{{ for a brace") from error
        unknown = sorted(fields - letters - {"expression"})
        if unknown or not (letters <= fields or "expression" in fields):
            raise ValueError(
                f"prompt {self.prompt!r} must have {{expression}} or all of {sorted(letters)}, and no other field"
                + (f"; it has {unknown}" if unknown else "")
            )
        return self


class Gsm8kConfig(EnvironmentConfig):
    """GSM8K (arXiv:2110.14168) or any data in its form: `question`, and `answer` whose last line is `#### 42`."""

    name: str = Field("gsm8k", description="grade-school word problems")
    train_path: Path | None = Field(None, description="a JSONL or Parquet file; instead of `dataset`")
    validation_path: Path | None = Field(None, description="the same; none: a share of the training data")
    dataset: str | None = Field(None, description="a Hugging Face data set, such as openai/gsm8k")
    subset: str | None = Field("main", description="configuration name of `dataset`")
    train_split: str = Field("train", description="split of `dataset`")
    validation_split: str | None = Field("test", description="split of `dataset`; none: a share of the training data")
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="the share of the questions that is held out where there is no validation data"
    )
    max_samples: PositiveInt | None = Field(None, description="use only the first samples of the training data")
    max_validation_samples: PositiveInt | None = Field(None, description="use only the first samples of validation")
    instruction: str = Field(
        "\nReason step by step, and write the final number on the last line after ####.",
        description="put after each question",
    )
    calculator_annotations: bool = Field(
        False, description="keep the <<48/2=24>> marks of the data in completions for supervised training"
    )
    format_reward: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="added to the reward of 1 for a right answer when the last line is `#### number`"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        files = self.train_path is not None or self.validation_path is not None
        if (not files and self.dataset is None) or (self.train_path is not None and self.dataset is not None):
            raise ValueError(
                "give either train_path (a JSONL or Parquet file) or dataset (a Hugging Face name); to evaluate, "
                "validation_path alone is enough"
            )
        if self.dataset is not None and self.validation_path is not None:
            raise ValueError("validation_path goes with train_path; with dataset, use validation_split")
        return self


class ColumnsConfig(Section):
    """What the columns of the data are called. A name that is not the usual one must be there in every row."""

    messages: str = Field("messages", description="a list of {role, content}")
    conversations: str = Field("conversations", description="a list of {from, value}, as ShareGPT has it")
    prompt: str = Field("prompt", description="text, or a list of messages")
    completion: str = Field("completion", description="what `prompt` or `question` is answered with; none: `answer`")
    question: str = Field("question", description="another word for `prompt`")
    answer: str = Field("answer", description="what answers are compared with: see `check`")
    text: str = Field("text", description="plain text, all of which is learnt")

    @cached_property
    def renamed(self) -> tuple[str, ...]:
        """The names that are not the usual ones."""
        usual = {name: info.default for name, info in type(self).model_fields.items()}
        return tuple(name for field, name in self if name != usual[field])

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """The columns that tell what a row is, the first to be looked for first: renamed ones, then the others."""
        names = (self.messages, self.conversations, self.prompt, self.question, self.text)
        return tuple(sorted(names, key=lambda name: name not in self.renamed))


class DatasetConfig(EnvironmentConfig):
    """Your own data: JSONL, Parquet, what `datasets.save_to_disk` wrote, or a name on the Hugging Face hub."""

    name: str = Field("dataset", description="your own rows")
    path: str = Field(description="a file, a directory or pattern (data/*.parquet) of files, or a name on the hub")
    subset: str | None = Field(None, description="configuration name, where the data has several")
    split: str | None = Field(None, description="none: `train`, or the only one")
    validation_path: str | None = Field(None, description="as `path`; none: other rows of `path`")
    validation_split: str | None = Field(None, description="none: a share of the training data")
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.05, description="the share of the prompts that is held out where there is no validation data"
    )
    max_samples: PositiveInt | None = Field(None, description="use only the first rows of the training data")
    max_validation_samples: PositiveInt = Field(1024, description="hold out, or use, at most this many")
    columns: ColumnsConfig = ColumnsConfig()
    instruction: str = Field("", description="put after the last user turn")
    check: Literal["none", "exact", "math"] = Field(
        "none",
        description="how answers are judged: not at all (for sft), the whole text, or by math-verify, where the gold "
        "answer may be text with #### before the result",
    )
    reward: str | None = Field(
        None, description="instead of `check`: your own function as an import path, such as my_rewards:score"
    )
    reward_timeout: Annotated[float, Field(gt=0.0)] | None = Field(
        60.0,
        description="seconds for an answer, for all of a step where the function takes all; the function runs in a "
        "process of its own, which is then ended. null: in this process, where nothing can end it",
    )
    reward_concurrency: PositiveInt = Field(16, description="calls of an async function that are awaited together")
    max_reward_failures: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.1, description="share of a step's answers that may have no reward because the function failed"
    )
    failed_reward: Annotated[float, Field(allow_inf_nan=False)] = Field(0.0, description="what such an answer gets")

    @property
    def judges(self) -> bool:
        """Whether answers have a reward."""
        return self.check != "none" or self.reward is not None

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.check != "none" and self.reward is not None:
            raise ValueError(f"reward ({self.reward}) and check ({self.check}) both judge answers: give one of them")
        return self

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig`. With validation data of its own, nothing is drawn.

        `max_validation_samples` counts all the same: prompts of those rows are left out of training.
        """
        drawn = self.validation_path is None and self.validation_split is None
        judging = {"check", "reward", "reward_timeout", "reward_concurrency", "max_reward_failures", "failed_reward"}
        drawing = set() if drawn else {"environment.validation_fraction", "seed"}
        return frozenset({f"environment.{key}" for key in judging} | drawing)
