"""The weights of a model in safetensors files, compared with the model that its `config.json` describes.

Files may omit the base model's prefix, store a tied weight under the head's name, and have weights as `save_pretrained`
writes them or as the model has them in memory: the experts of a mixture one by one or stacked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.hub import local_files_only
from rlframework.models.file_weights import FileWeight, named_tensors
from rlframework.policy.checkpoint.saved import Saved, SavedTensors
from rlframework.policy.head.patch import SCORE_WEIGHT


def weights_folder(model_name: str) -> Path | None:
    """Return the directory with the safetensors files of `model_name`, downloading if necessary; None without files."""
    folder = Path(model_name)
    if not folder.is_dir():
        try:
            patterns = ["model*.safetensors", "*.json"]
            local = local_files_only(model_name)
            folder = Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=local))
        except (OSError, ValueError) as error:
            raise DataError(
                f"policy.model_name={model_name!r} is not a directory and cannot be downloaded: {error}"
            ) from error
    return folder if any(folder.glob("model*.safetensors")) else None


class ModelFiles(Saved):
    """The `weights` of a model in the safetensors files of `folder`, by name.

    `prefix`: the base model's, with its dot, which files may omit or add. `other_names`: of tied weights. `missing`:
    the weights that the files lack. Raises `DataError` for a weight of another shape and, when it is read, one that is
    not finite.
    """

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, FileWeight],
        prefix: str,
        other_names: Mapping[str, Sequence[str]],
        model_config: Any = None,
        *,
        new: Collection[str] = (),
    ) -> None:
        """`model_config`: to name the fields that belong to a wrong shape.

        `new`: weights that the files must not have, which are zeros.
        """
        self._files, self._weights = SavedTensors(folder), weights
        self._names = {
            name: [one for of in (name, *other_names.get(name, ())) if (one := self._stored(prefix, of))]
            for name in weights
        }
        located: dict[str, FileWeight] = {}
        for name, weight in weights.items():
            if name in new:
                if self._stored(prefix, name):
                    raise has_a_head(folder)
                continue
            if stored := self._stored(prefix, name, *other_names.get(name, ())):
                located[name] = FileWeight(name, stored, weight.shape, weight.shape)
            elif stored := self._stored(prefix, weight.source):
                located[name] = replace(weight, source=stored)
            else:
                continue
            if (found := self._files.shape(stored)) != (wanted := located[name].whole):
                raise DataError(other_shape(folder, stored, found, wanted, model_config))
        self.missing = [name for name in weights if name not in located and name not in new]
        self._new = {name: weights[name].shape for name in weights if name in new}
        super().__init__(folder, located)

    def __iter__(self) -> Iterator[str]:
        return chain(self._entries, self._new)

    def __len__(self) -> int:
        return len(self._entries) + len(self._new)

    def _stored(self, prefix: str, *names: str) -> str | None:
        """Return the first of `names`, with the `prefix` or without, that the files have."""
        candidates = (form for name in names for form in (name, name.removeprefix(prefix), prefix + name))
        return next((name for name in candidates if name in self._files), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return self._new[name] if name in self._new else tuple(self._entries[name].shape)

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        if name in self._new:
            return torch.zeros([one.stop - one.start for one in where])
        part: FileWeight = self._entries[name]
        if part.is_part:
            where = (slice(where[0].start + part.start, where[0].stop + part.start), *where[1:])
            where = where if part.expert is None else (slice(part.expert, part.expert + 1), *where)
        found = self._files.read_slice(part.source, where)
        require_finite(found, part.source, self.folder)
        return found if part.expert is None else found[0]

    def require_used(self, model: Any, model_config: Any, head: str) -> None:
        """Raise `DataError` for weights that `model` lacks, integers in place of fractions, and ties that differ."""
        tensors = named_tensors(model)
        for name, entry in self._entries.items():
            tensor, dtype = tensors.get(self._weights[name].source), self._files.dtype(entry.source)
            if tensor is not None and tensor.is_floating_point() and not dtype.is_floating_point:
                raise DataError(f"{self.folder} has {entry.source} as {dtype}, but it must be of floating point")
        used = {weight.source for weight in self._entries.values()}.union(*self._names.values())
        if unused := unused_weights((name for name in self._files if name not in used), model, head):
            layers = number_of_layers(model_config)
            raise DataError(f"{self.folder} has {unused[:3]}, which its config.json does not describe{layers}")
        for first, *others in filter(None, self._names.values()):
            if any(not torch.equal(self._files[first], self._files[other]) for other in others):
                raise DataError(
                    f"{self.folder} has different values of {first} and {others[0]}, which its config.json ties; set "
                    "tie_word_embeddings in it to false, or remove one of them"
                )


def new_weights(config: PolicyConfig) -> frozenset[str]:
    """Return the names of weights that begin at zeros rather than as in the model's files."""
    return frozenset({SCORE_WEIGHT}) if config.head_init == "zeros" else frozenset()


def has_a_head(place: object) -> DataError:
    """Return the error for a new head on a model that has one."""
    return DataError(
        f"policy.head_init=zeros is for models without {SCORE_WEIGHT}, but {place} has it; remove head_init to use it"
    )


def new_head_hint(missing: Collection[str]) -> str:
    """Return what to do if the weights `missing` from a model's files are those of its head; empty otherwise."""
    if set(missing) != {SCORE_WEIGHT}:
        return ""
    return ": it is a language model; set policy.head_init=zeros to start with a new head"


def other_shape(place: object, name: str, found: Any, wanted: Any, model_config: Any) -> str:
    """Say that `name` has another shape in files than `model_config` describes, with the fields of the wrong sizes."""
    wrong = {size for size, there in zip_longest(wanted, found) if size != there}
    sizes = {} if model_config is None else model_config.get_text_config().to_dict()
    fields = [f"{key}={size}" for key, size in sizes.items() if type(size) is int and size in wrong]
    said = f" ({', '.join(fields)})" if fields else ""
    return f"{place} has {name} with shape {tuple(found)}, but its config.json describes {tuple(wanted)}{said}"


def number_of_layers(model_config: Any) -> str:
    """Return the number of layers in `model_config` in parentheses, for messages; empty if it has none."""
    layers = getattr(model_config.get_text_config(), "num_hidden_layers", None)
    return "" if layers is None else f" (num_hidden_layers={layers})"


def unused_weights(names: Iterable[str], model: Any, head: str) -> list[str]:
    """Return those of the weights `names`, which `model` lacks, that do not belong to another use of the same model.

    These are buffers that older releases saved, what the classes of transformers say to ignore, and the language head
    beside that of a reward model.
    """
    known = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$"]
    known += [r"(^|\.)lm_head\."] * (head != "language") + list(
        getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    )
    return sorted(name for name in names if not re.search("|".join(known), name))


def require_finite(weight: Tensor, name: str, place: object) -> None:
    """Raise `DataError` if `weight`, read from the model `place`, has a NaN or an infinity."""
    known = weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if known and weight.numel() and not all(bound.isfinite() for bound in weight.detach().aminmax()):
        raise DataError(f"the weight {name} of {place} has values that are not finite; use another copy of it")
