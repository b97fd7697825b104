"""The processor of a vision-language model: what transformers makes of its images, without its videos."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rlframework.base.errors import DataError
from rlframework.huggingface.hub import local_files_only, quiet_hub
from rlframework.huggingface.model_directories import first_size

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NEEDED = "get_text_with_replacements"
"""A method of processors since transformers 5.24, by which they tell what replaces the placeholder of each image."""


def load_processor(name: str, config: Any, tokenizer: Any) -> Any:
    """Load the processor of the model `name`, which has `config`, with `tokenizer` in place of its own.

    Raises a `DataError` if transformers knows none for this kind of model, or it cannot be loaded.
    """
    import transformers
    from transformers.models.auto import processing_auto

    known: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    kind = known.get(config.model_type)
    if kind is None:
        raise DataError(
            f"environment.images is set, but a {config.model_type} model takes no images that transformers has a "
            f"processor for; set policy.model_name={name!r} to a vision-language model, or remove environment.images"
        )
    try:
        with quiet_hub():
            made = _without_videos(getattr(transformers, kind)).from_pretrained(
                name, local_files_only=local_files_only(name)
            )
    except Exception as error:  # transformers raises anything, also for packages that are missing
        raise DataError(
            f"the image processor of policy.model_name={name!r} ({kind}) cannot be loaded: {error!s:.500}. Its files "
            "are preprocessor_config.json or processor_config.json; some kinds need further packages, such as "
            "torchvision"
        ) from error
    if not hasattr(made, _NEEDED):
        raise DataError(f"images need transformers 5.24 or later; this is {transformers.__version__}")
    made.tokenizer = tokenizer
    return made


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files of the processor of the model `name`, if it has any, into `folder`."""
    from transformers.utils.hub import cached_file

    for file in _FILES:
        found = Path(name) / file
        if not Path(name).is_dir():
            cached = cached_file(
                name,
                file,
                local_files_only=True,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            found = Path(cached or file)
        if found.is_file():
            shutil.copyfile(found, folder / file)


def _without_videos(kind: type[Any]) -> type[Any]:
    """Return the class `kind` without a video processor, which needs packages that images do not need."""

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in kind.get_attributes() if name != "video_processor"]

    return type(kind.__name__, (kind,), {"get_attributes": classmethod(get_attributes)})


def image_tokens(config: Any) -> list[int]:
    """Return the tokens that stand for features of images, videos or sounds in a model of `config`; none for text."""
    names = [f"{medium}_token_{end}" for medium in ("image", "video", "audio") for end in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and token >= 0)


def never_sampled(config: Any) -> list[int]:
    """Return the `image_tokens` that the vocabulary has: models may have none for a medium that they do not take."""
    size = first_size(config.get_text_config(), "vocab_size")
    return [token for token in image_tokens(config) if size is None or token < size]


def image_token(config: Any) -> int:
    """Return the token that stands for a feature of an image in a model of `config`."""
    found: Any = getattr(config, "image_token_id", None)
    return int(config.image_token_index if found is None else found)
