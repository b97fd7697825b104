"""The section of the environment of preference pairs: `environment: {name: preferences, ...}`."""

from typing import Annotated, Literal

from pydantic import Field

from rlframework.config.base import Section
from rlframework.config.environments import RowsConfig
from rlframework.config.numbers import Steps


class PreferenceColumnsConfig(Section):
    """Names of the columns of preference pairs."""

    prompt: str = Field("prompt", description="column with the prompt: text, or a list of messages; may be absent")
    chosen: str = Field("chosen", description="column with the chosen answer: text, or a list of messages")
    rejected: str = Field("rejected", description="column with the rejected answer: text, or a list of messages")
    image: str = Field("image", description="column with an image of the prompt, as in `dataset`")
    images: str = Field("images", description="column with a list of images of the prompt, after that of `image`")


class PreferencesConfig(RowsConfig):
    """Preference pairs from JSONL, Parquet, the output of `datasets.save_to_disk`, or the Hugging Face Hub.

    All rows are read into memory. No prompt of the validation data is trained on, ignoring case and spacing.
    """

    name: str = Field("preferences", description="chosen and rejected answers to prompts")
    subset: str | None = Field(None, description="configuration name, if the dataset has several")
    split: str | None = Field(None, description="training split; null: `train`, or the only split")
    validation_split: str | None = Field(None, description="validation split; null: hold out part of the training data")
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.05, description="fraction of the prompts to hold out when no validation data is given; 0: none"
    )
    max_samples: Steps | None = Field(None, description="use only this many of the first training pairs")
    max_validation_samples: Steps = Field(1024, description="maximum validation pairs, held out or given")
    columns: PreferenceColumnsConfig = PreferenceColumnsConfig()
    instruction: str = Field("", description="text appended to the last user turn")
    pairs: Literal["all", "one"] = Field(
        "all",
        description="of rows with several graded solutions to a question: train on each right with each wrong one, or "
        "on one pair per question. Validation has one pair per question, so that pairs are independent",
    )
