"""The sections of the built-in environments: `environment: {name: addition | gsm8k | dataset, ...}`."""

import re
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from rlframework.config.base import CallableAsPath, ImportsCode, Section, import_path
from rlframework.config.endpoint import JudgeConfig
from rlframework.config.numbers import Coefficient, Count, Fraction, Seconds, Steps, Workers
from rlframework.config.sections import EnvironmentConfig

MAX_TERMS = len(string.ascii_lowercase)

Term = Annotated[int, Field(ge=0, le=10**12)]
Generated = Annotated[int, Field(gt=0, le=10_000_000)]


class AdditionConfig(EnvironmentConfig):
    """Sums of integers, generated from the seed. A task is held out for validation in every order of its terms."""

    name: str = Field("addition", description="sums of integers")
    digits: Annotated[int, Field(gt=0, le=9)] = Field(2, description="maximum digits of a term: 2 means 0 to 99")
    operands: tuple[Term, Term] | None = Field(None, description="[smallest, largest] of a term; overrides `digits`")
    terms: Annotated[int, Field(ge=2, le=MAX_TERMS)] = Field(2, description="number of terms in a sum")
    train_samples: Generated = Field(8192, description="maximum number of distinct training tasks")
    validation_samples: Generated | None = Field(
        None, description="distinct tasks held out for validation; null: a tenth of all tasks, at most 256"
    )
    prompt: str = Field(
        "{expression}=", description="prompt template with {expression} (such as 12+34), or {a}, {b}, ... for the terms"
    )
    answer: Literal["exact", "first_integer", "last_integer"] = Field(
        "exact", description="what to compare: the stripped completion, or the first or last integer in it"
    )

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest term."""
        return self.operands if self.operands is not None else (0, 10**self.digits - 1)

    @model_validator(mode="after")
    def _operands_and_prompt(self) -> Self:
        low, high = self.bounds
        if not 0 <= low <= high:
            raise ValueError(f"operands must be [smallest, largest] with 0 <= smallest <= largest, not [{low}, {high}]")
        letters = set(string.ascii_lowercase[: self.terms])
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        except ValueError as error:
            hint = f"{error}; write {{{{ for a literal brace"
            raise ValueError(f"prompt {self.prompt!r} is not a valid template: {hint}") from error
        unknown = sorted(fields - letters - {"expression"})
        if unknown or not (letters <= fields or "expression" in fields):
            raise ValueError(
                f"prompt {self.prompt!r} must contain {{expression}} or all of {sorted(letters)}, and no other fields"
                + (f"; it contains {unknown}" if unknown else "")
            )
        return self


class Gsm8kConfig(EnvironmentConfig):
    """GSM8K (arXiv:2110.14168), or data in its format: `question`, and `answer` whose last line is `#### 42`."""

    name: str = Field("gsm8k", description="grade-school math word problems")
    train_path: Path | None = Field(None, description="JSONL, Parquet or CSV file to train on, instead of `dataset`")
    validation_path: Path | None = Field(
        None, description="JSONL, Parquet or CSV file; null: hold out part of `train_path`"
    )
    dataset: str | None = Field(None, description="name of a Hugging Face dataset, such as openai/gsm8k")
    subset: str | None = Field("main", description="configuration name of `dataset`")
    train_split: str = Field("train", description="training split of `dataset`")
    validation_split: str | None = Field(
        "test", description="validation split of `dataset`; null: hold out part of the training data"
    )
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.05, description="fraction of the questions to hold out when no validation data is given; 0: none"
    )
    max_samples: Steps | None = Field(None, description="use only this many of the first training samples")
    max_validation_samples: Steps | None = Field(
        None, description="use only this many samples from the start of the validation data"
    )
    instruction: str = Field(
        "\nReason step by step, and write the final number on the last line after ####.",
        description="text appended to each question",
    )
    calculator_annotations: bool = Field(False, description="keep annotations such as <<48/2=24>> in the completions")
    format_reward: Coefficient = Field(
        0.0, description="bonus on top of the reward of 1 for a correct answer, if the last line is `#### number`"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        files = self.train_path is not None or self.validation_path is not None
        if (not files and self.dataset is None) or (self.train_path is not None and self.dataset is not None):
            either = "set either train_path (a JSONL, Parquet or CSV file) or dataset (a Hugging Face name)"
            raise ValueError(f"{either}; evaluation needs only validation_path")
        if self.dataset is not None and self.validation_path is not None:
            raise ValueError("validation_path is used with train_path; with dataset, set validation_split instead")
        return self


class ColumnsConfig(Section):
    """Names of columns, or dotted names of values in them. Those with a non-default name must be in every row."""

    messages: str = Field("messages", description="column with a list of {role, content}, perhaps with tool calls")
    conversations: str = Field("conversations", description="column with a list of {from, value}, as in ShareGPT")
    prompt: str = Field("prompt", description="column with the prompt: text, or a list of messages")
    completion: str = Field("completion", description="column with the completion to learn; `answer` if there is none")
    question: str = Field("question", description="column with the prompt, as an alternative to `prompt`")
    answer: str = Field("answer", description="column with the reference answer for `check`")
    text: str = Field("text", description="column with plain text, all of it trained on")
    tools: str = Field("tools", description="column with the tools that the conversation may call: a list, or as JSON")
    image: str = Field("image", description="column with an image: path, bytes, or as `datasets` stores it")
    images: str = Field("images", description="column with a list of images, after that of `image`")

    @cached_property
    def renamed(self) -> tuple[str, ...]:
        """The column names that differ from the defaults."""
        usual = {name: info.default for name, info in type(self).model_fields.items()}
        return tuple(name for field, name in self if name != usual[field])

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """The columns that determine the kind of a row, in order of lookup: renamed columns first."""
        names = (self.messages, self.conversations, self.prompt, self.question, self.text)
        return tuple(sorted(names, key=lambda name: name not in self.renamed))


class WeightedReward(Section):
    """One of several rewards: a function, or a judge."""

    function: Annotated[str | None, CallableAsPath, ImportsCode()] = Field(
        None, description="import path of the reward function"
    )
    judge: JudgeConfig | None = Field(None, description="a model behind an OpenAI-compatible endpoint that scores")
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = Field(1.0, description="factor of its reward in the sum")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.function is None) == (self.judge is None):
            given = "none is" if self.function is None else "both are"
            raise ValueError(f"set one of function (an import path) and judge (a section); {given} given")
        return self


def _with_colon(path: str) -> str:
    """`path` as `module:name`, if it is `module.name`."""
    module, _, name = path.rpartition(".")
    return f"{module}:{name}" if module and ":" not in path else path


def _named(rewards: Sequence[object]) -> str:
    """The section of `rewards`, each named after its function, as YAML."""
    paths = [import_path(each) if callable(each) else _with_colon(str(each)) for each in rewards]
    names = [re.sub(r"\W", "_", path.rpartition(":")[2]) or "reward" for path in paths]
    unique = [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names)]
    written = [f'{name}: {{function: "{path}", weight: 1.0}}' for name, path in zip(unique, paths, strict=True)]
    return f"{{{', '.join(written)}}}"


RewardName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class RowsConfig(EnvironmentConfig):
    """An environment whose training rows are in files, on the hub, or given by Python code."""

    path: str | None = Field(
        None,
        description="file, directory, glob pattern (data/*.parquet), or name of a dataset on the Hugging Face Hub; "
        "null: rows that Python code gives to the run",
    )
    validation_path: str | None = Field(
        None, description="validation data, in any form of `path`; null: rows of `path` that are not trained on"
    )
    data_digest: str | None = Field(
        None, description="written by a run on rows from Python, to compare them with those given on a resume"
    )
    _given: Any = PrivateAttr(None)

    @property
    def given(self) -> Any:
        """The `GivenRows` of `with_given`, or None. They exist in this process only: dumps have the digest alone."""
        return self._given

    def with_given(self, rows: Any, digest: str) -> Self:
        """Return this section with `rows` from Python code and their digest."""
        section = self.model_copy(update={"data_digest": digest})
        section._given = rows
        return section

    @property
    def named_data(self) -> str | None:
        """The key that names the training data, or None."""
        return None if self.path is None else "path"

    @property
    def source(self) -> str:
        """The training data, for messages."""
        return self.path or "the rows from Python"


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: str = Field(description="the rows, in any form of `environment.path`")
    weight: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        1.0, description="its share of the training rows is this divided by the sum of all weights"
    )
    subset: str | None = Field(None, description="configuration name, if the dataset has several")
    split: str | None = Field(None, description="training split; null: `train`, or the only split")


SourceName = RewardName


class SplitRowsConfig(RowsConfig):
    """Rows with a part for validation, which is named, given, or held out."""

    subset: str | None = Field(None, description="configuration name, if the dataset has several")
    split: str | None = Field(None, description="training split; null: `train`, or the only split")
    validation_split: str | None = Field(None, description="validation split; null: hold out part of the training data")
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.05, description="fraction of the prompts to hold out when no validation data is given; 0: none"
    )
    max_samples: Steps | None = Field(None, description="use only this many of the first training rows")
    max_validation_samples: Steps = Field(1024, description="maximum validation samples, held out or given")
    instruction: str = Field("", description="text appended to the last user turn")


class DatasetConfig(SplitRowsConfig):
    """Your own data: JSONL, Parquet, CSV, output of `datasets.save_to_disk`, or a data set on the Hugging Face Hub."""

    name: str = Field("dataset", description="your own dataset")
    mixture: Mapping[SourceName, SourceConfig] | None = Field(
        None, description="several sources by name instead of `path`, each {path: ..., weight: 1.0}"
    )
    columns: ColumnsConfig = ColumnsConfig()
    check: Literal["none", "exact", "math"] = Field(
        "none",
        description="how completions are scored. none: not at all (for sft); exact: by exact match; math: by "
        "math-verify, where the reference answer may be a text that ends in `#### result`",
    )
    reward: Annotated[str | Mapping[RewardName, WeightedReward] | None, ImportsCode()] = Field(
        None,
        description="import path of your reward function, an alternative to `check`; or several by name, each "
        "{function: import path, weight: 1.0} or {judge: {...}, weight: 1.0}, whose weighted sum is the reward",
    )
    reward_timeout: Seconds | None = Field(
        60.0,
        description="time limit of the reward function in seconds, per completion, or per step for a batched function; "
        "it runs in a separate process, which is killed on timeout. null: run it in this process, without a limit",
    )
    reward_concurrency: Workers = Field(16, description="maximum concurrent calls of an async reward function")
    max_reward_failures: Fraction = Field(
        0.1,
        description="fraction of a training step's completions for which a reward may fail before the run ends; "
        "asynchronous training, which scores them group by group, counts over the same completions",
    )
    failed_reward: float = Field(0.0, ge=-1e6, le=1e6, description="reward where the reward function failed")

    @property
    def named_data(self) -> str | None:
        """See `RowsConfig.named_data`."""
        return super().named_data or (None if self.mixture is None else "mixture")

    @property
    def source(self) -> str:
        """See `RowsConfig.source`."""
        return super().source if self.mixture is None else f"the mixture of {', '.join(self.mixture)}"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        named = {"path": self.path, "mixture": self.mixture, "data_digest": self.data_digest}
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each say where the training rows come from; set only one of them")
        for name in ("subset", "split", "validation_split") if self.path is None else ():
            if getattr(self, name) is not None:
                instead = "validation_path" if name == "validation_split" else f"{name} of a source of the mixture"
                raise ValueError(f"{name} is for environment.path, which is not set; remove it, or set {instead}")
        return self

    @field_validator("mixture")
    @classmethod
    def _some_source(cls, mixture: Mapping[str, SourceConfig] | None) -> Mapping[str, SourceConfig] | None:
        if mixture is not None and not mixture:
            raise ValueError("mixture has no sources; name at least one, or remove the key")
        return mixture

    @field_validator("reward", mode="before")
    @classmethod
    def _import_path(cls, reward: object) -> object:
        """Replace a function by its import path; of a list, say how several rewards are written."""
        if isinstance(reward, (list, tuple)):
            raise ValueError(f"several rewards are not a list, but a section with a name for each: {_named(reward)}")
        return import_path(reward) if callable(reward) else reward

    @field_validator("reward")
    @classmethod
    def _several_rewards(cls, reward: object) -> object:
        if isinstance(reward, Mapping):
            if not reward:
                raise ValueError("reward has no functions; name at least one, or remove the key")
            if taken := sorted(reward.keys() & {"accuracy", "reward", "reward_failures"}):
                raise ValueError(f"{', '.join(taken)} cannot be the name of a reward function; choose another")
        return reward

    @property
    def reward_functions(self) -> Mapping[str, str]:
        """The import paths of the reward functions, by the key that holds them; empty if there are none."""
        if isinstance(self.reward, Mapping):
            named = {f"environment.reward.{name}.function": part.function for name, part in self.reward.items()}
            return {key: path for key, path in named.items() if path is not None}
        return {} if self.reward is None else {"environment.reward": self.reward}

    @property
    def scores_completions(self) -> bool:
        """Whether completions are given a reward."""
        return self.check != "none" or self.reward is not None

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.check != "none" and self.reward is not None:
            named = self.reward if isinstance(self.reward, Mapping) else [self.reward]
            both = f"reward ({', '.join(map(str, named))}) and check ({self.check})"
            raise ValueError(f"{both} both score completions; set only one of them")
        return self

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`. With separate validation data, no rows are drawn at random.

        `max_validation_samples` still matters: the prompts of those rows are excluded from training.
        """
        drawn = self.validation_path is None and self.validation_split is None
        weights = {f"mixture.{name}.weight" for name in self.mixture or ()}
        judging = {"check", "reward", "reward_timeout", "reward_concurrency", "max_reward_failures", "failed_reward"}
        drawing = set() if drawn else {"environment.validation_fraction", "seed"}
        return super().unseen_by_training | {f"environment.{key}" for key in judging | weights} | drawing


Number = Annotated[float, Field(ge=-1e6, le=1e6)]


class ToolDataConfig(DatasetConfig):
    """Rows of your data as tasks that the model solves with tools."""

    max_calls_per_turn: Count = Field(16, description="tool calls of one turn that are made; further ones are refused")
    max_result_characters: Count = Field(
        4000, description="characters of a tool's result that the model sees; the rest is cut"
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`: tools do not change the rows."""
        return super().unseen_by_training | {"environment.max_calls_per_turn", "environment.max_result_characters"}


class ToolsConfig(ToolDataConfig):
    """The public methods of a class of yours as tools: a new object for each episode."""

    name: str = Field("tools", description="the methods of a class as tools")
    tools: Annotated[str, CallableAsPath, ImportsCode()] = Field(
        description="import path of the class; its method `reward(self, completion)`, if any, scores the answer"
    )


class AttemptsConfig(EnvironmentConfig):
    """Attempts of agents with a loop of their own, which talk to the run's OpenAI-compatible endpoint."""

    agent_timeout: Seconds = Field(300.0, description="seconds for each attempt; one that takes longer fails, alone")
    agent_sampling: Literal["reject", "override"] = Field(
        "reject",
        description="what becomes of an agent's temperature or top_p that is not the run's: reject with an error, or "
        "override with the run's",
    )

    @property
    def unseen_by_training(self) -> frozenset[str]:
        """See `EnvironmentConfig.unseen_by_training`: limits of attempts do not change the rows."""
        return super().unseen_by_training | {"environment.agent_timeout", "environment.agent_sampling"}
