"""The sections of the observers that send a run to a service: `observers: {wandb: {...}, mlflow: {...}}`.

There is no key for a password or an API key here, because the configuration is written down with the run: W&B takes it
from `wandb login` or WANDB_API_KEY, MLflow from MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rlframework.config.base import Section


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`."""

    project: str = Field("rlframework", description="the project that the run is shown in")
    entity: str | None = Field(None, description="a user or team; none: W&B's own default")
    run_name: str | None = Field(None, description="none: the name of output_dir")
    tags: tuple[str, ...] = Field((), description="words to find the run by")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: everything stays in output_dir/wandb, for `wandb sync` later"
    )


class MlflowConfig(Section):
    """MLflow; needs the extra `mlflow`."""

    tracking_uri: str | None = Field(
        None, description="a server (http://...) or sqlite:///file; none: MLFLOW_TRACKING_URI, or MLflow's own default"
    )
    experiment: str = Field("rlframework", description="the experiment that the run is shown in")
    run_name: str | None = Field(None, description="none: the name of output_dir")
    tags: Mapping[str, str] = Field(default_factory=dict, description="names and values to find the run by")
