"""The base of every configuration model: unknown keys are errors, instances are frozen."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the configuration. Plugins derive their own sections from this."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
