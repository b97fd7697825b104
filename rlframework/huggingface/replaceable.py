"""Directories that a save may replace: those that hold nothing but the files of an earlier save."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlframework.base.errors import UserError

_SAVED = re.compile(
    r"""
    ((adapter|generation|image_processor|preprocessor|processor|tokenizer|video_preprocessor)_)?config\.json
    | (model|adapter_model|pytorch_model)([.-][\w.-]+)?\.(safetensors|bin)(\.index\.json)?
    | tokenizer\.json | (tokenizer|spiece|spm|sentencepiece)(\.bpe)?\.model
    | (special_tokens_map|added_tokens|vocab|normalizer)\.json | vocab\.txt | merges\.txt
    | chat_template\.(jinja|json)
    | (configuration|modeling|tokenization|processing|image_processing)_\w+\.py
    | base\.json | checksums\.json | training\.json | random\.safetensors
    | native\.json | \.metadata | __\d+_\d+\.distcp
    """,
    re.VERBOSE,
)
"""Names that transformers, peft and checkpoints write into the directory of a model, an adapter or an optimizer."""
_LISTED = 5


def check_replaceable(path: str | Path) -> None:
    """Raise `UserError` if a save to the directory `path` would delete what no save wrote; nothing is touched.

    A directory may be missing, empty, or hold only files with the names that a save gives.
    """
    folder = Path(path)
    if folder.name in ("", ".."):
        raise UserError(f"cannot save to {str(path)!r}: give the name of a directory for the files, such as 'trained'")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UserError(f"cannot save to {str(path)!r}: it is a file, and a save is a directory; give another name")
    if foreign := sorted(entry.name for entry in folder.iterdir() if not _is_saved(entry)):
        more = f" and {len(foreign) - _LISTED} more" if len(foreign) > _LISTED else ""
        raise UserError(
            f"cannot save to {str(path)!r}: the directory would be replaced, and it holds files that no save wrote "
            f"({', '.join(foreign[:_LISTED])}{more}); give another directory, or move these away"
        )


def _is_saved(entry: Path) -> bool:
    if entry.is_dir():
        native = entry.name == "engine" and (entry.parent / "native.json").is_file()
        templates = entry.name == "additional_chat_templates"
        return native or (templates and all(each.suffix == ".jinja" for each in entry.iterdir()))
    return _SAVED.fullmatch(entry.name) is not None
