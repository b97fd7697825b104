"""The section `environment.images`: rows with images."""

from typing import Annotated, Literal

from pydantic import Field

from rlframework.config.base import NeedsTrust, Section


class ImagesConfig(Section):
    """Rows may have images, which the model's own processor turns into its inputs."""

    root: str | None = Field(
        None, description="folder that relative paths of images start from; null: the folder of the data"
    )
    invalid: Literal["error", "skip"] = Field(
        "error", description="what to do with a row whose image cannot be used: end before any work, or leave it out"
    )
    max_pixels: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        50_000_000, description="most pixels of an image, checked before it is decoded"
    )
    allow_addresses: Annotated[bool, NeedsTrust("makes this machine read the addresses that the data names")] = Field(
        False,
        description="read images of rows at http and https addresses, each once, and keep them in memory; false: the "
        "image of such a row cannot be used",
    )
