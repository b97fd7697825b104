"""The weights of a base model with adapters merged into them, read one by one from their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.base.errors import DataError
from rlframework.policy.checkpoint.adapter import adapter_config, adapter_matrices, base_folder, require_base
from rlframework.policy.checkpoint.saved import Saved, SavedTensors
from rlframework.policy.lora_math import A, B, is_adapter, merge

if TYPE_CHECKING:
    from torch import Tensor


class MergedWeights(Saved):
    """The weights of the model that the adapters in `folder` belong to, with the adapters merged into them.

    A weight with an adapter is fp32, the others have the dtype of the base's files. `base`: the name of the base model,
    as the adapters' files have it. Raises a `DataError` if it is not here, has other files than those that the adapters
    were trained on, or lacks a layer of theirs.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        config = adapter_config(path)
        self.base = str(config.get("base_model_name_or_path"))
        if (base := base_folder(self.base)) is None:
            raise DataError(
                f"the adapters in {path} belong to {self.base!r}, which is neither a directory here nor a downloaded "
                "model; a relative path counts from the directory in which the run was started"
            )
        require_base(path, self.base)
        self._base, self._adapters = SavedTensors(base), adapter_matrices(path)
        self._scale = float(config["lora_alpha"]) / int(config["r"])
        layers = {name.removesuffix(A).removesuffix(B) for name in self._adapters if is_adapter(name)}
        if missing := sorted(layer for layer in layers if f"{layer}.weight" not in self._base):
            raise DataError(
                f"the files of {self.base!r} have no {missing[0]}.weight, to which an adapter in {path} belongs: its "
                "weights have other names in files; merge them with peft's merge_and_unload"
            )
        super().__init__(base, dict.fromkeys(self._base))

    def __getitem__(self, name: str) -> Tensor:
        weight, layer = self._base[name], name.removesuffix(".weight")
        if layer + A not in self._adapters:
            return weight
        return merge(weight.float(), self._adapters[layer + A], self._adapters[layer + B], self._scale)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Saved.shape`."""
        return self._base.shape(name)

    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """See `Saved.read_slice`."""
        return self[name][where]
