"""The sections of the observers that report to a tracking service: `observers: {wandb: {...}, mlflow: {...}}`.

The sections have no keys for passwords or API keys, because the configuration is saved with the run. W&B reads its key
from `wandb login` or WANDB_API_KEY, MLflow from MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rlframework.config.base import Section


class WandbConfig(Section):
    """Report to Weights & Biases. Requires the extra `wandb`."""

    project: str = Field("rlframework", description="project to log the run to")
    entity: str | None = Field(None, description="user or team that owns the project; null: W&B's default")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: write to output_dir/wandb, to upload later with `wandb sync`"
    )


class MlflowConfig(Section):
    """Report to MLflow. Requires the extra `mlflow`."""

    tracking_uri: str | None = Field(
        None,
        description="server (http://...) or sqlite:///file; null: MLFLOW_TRACKING_URI if set, else MLflow's default",
    )
    experiment: str = Field("rlframework", description="experiment to log the run to")
    run_name: str | None = Field(None, description="display name of the run; null: the last component of output_dir")
    tags: Mapping[str, str] = Field(default_factory=dict, description="tags of the run, by name")
