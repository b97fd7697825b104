"""The engine-independent part of LoRA: the base as reference, and saving, loading, sending and merging adapters.

`PolicyWorkerBase` derives from `Adapters`; an engine that declares LoRA supplies its four primitives. From outside, the
model is the merged one under the base's names (`Engine.weight_specs`, `Engine.gather_weights`), so weight sync,
generation and `save_pretrained` need no knowledge of adapters. The files are described in `checkpoint/adapter.py`. Not
supported: several adapters at a time, dropout, adapters of embeddings and heads.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn

from rlframework.errors import NotSupported
from rlframework.policy.checkpoint_io import Saving
from rlframework.policy.lora_math import B
from rlframework.policy.model_state import WeightSpec
from rlframework.policy.scoring import Scoring
from rlframework.policy.weight_sender import Refitting
from rlframework.weight_sync.buffers import WeightInfo

if TYPE_CHECKING:
    from torch import Tensor


class Adapters(Scoring, Saving, Refitting, ABC):
    """The worker's handling of `policy.lora`, on the primitives of an engine."""

    _init_reference_model: bool

    # -- primitives ---------------------------------------------------------------------------------------------------

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """Return the specs of the adapters' matrices, two per layer, by layer path plus `A` or `B`. No collective."""
        self._no_adapters()

    def gather_adapters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole matrices in fp32, one at a time, on every rank.

        Collective: all ranks must request the same names and exhaust the iterator.
        """
        self._no_adapters()

    def take_adapters(self, adapters: Mapping[str, Tensor]) -> None:
        """Load whole matrices, for all names in `adapter_specs`. No collective.

        Each rank copies its shards in place.
        """
        self._no_adapters()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context manager: disable the adapters, so that the model equals its base bit for bit.

        They are enabled again on exit, also after an exception.
        """
        self._no_adapters()

    def _no_adapters(self) -> NoReturn:
        raise NotSupported(f"{type(self).__name__} has no adapters: policy.lora is not set, or its backend has no LoRA")

    # -- calls --------------------------------------------------------------------------------------------------------

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """See `PolicyWorker.use_reference_model`; with adapters the base is the reference and no copy is kept."""
        if self.config.lora is None or not self._init_reference_model:
            with super().use_reference_model():
                yield
            return
        with self.without_adapters():
            yield

    def save_adapter(self, path: str) -> None:
        """See `PolicyWorker.save_adapter`."""
        self._write_adapter(path, checksums=False)

    def _write_adapter(self, path: str, *, checksums: bool) -> None:
        from rlframework.policy.checkpoint.adapter import write_adapter

        lora = self.config.lora
        self._onload("model")
        adapters = self.gather_adapters(self.adapter_specs())
        if self.context.rank == 0 and lora is not None:
            write_adapter(path, adapters, self.config.model_name, lora, self.tokenizer, checksums=checksums)
        else:
            for _ in adapters:
                pass

    def load_adapter(self, path: str) -> None:
        """See `PolicyWorker.load_adapter`."""
        self._read_adapter(path)
        self._weights_version += 1

    def _read_adapter(self, path: str) -> None:
        from rlframework.policy.checkpoint.adapter import read_adapter

        specs = self.adapter_specs()
        assert self.config.lora is not None
        self._onload("model")
        self.take_adapters(read_adapter(path, specs, self.config.model_name, self.config.lora))

    # -- refits -------------------------------------------------------------------------------------------------------

    def _sends_adapters(self) -> bool:
        return self.config.lora is not None and self.config.lora.refit == "adapters"

    def _transfer_info(self) -> WeightInfo:
        """See `Refitting`: adapters are sent and merged in fp32, so the engine gets exactly the result of `merge`."""
        if not self._sends_adapters():
            return super()._transfer_info()
        return {name: (spec.shape, spec.dtype) for name, spec in self.adapter_specs().items()}

    def _weights_to_send(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Refitting`; B is sent multiplied by the scale, so that the engine need not know it."""
        if self.config.lora is None or not self._sends_adapters():
            yield from super()._weights_to_send(names)
            return
        for name, matrix in self.gather_adapters(names):
            yield name, matrix * self.config.lora.scale if name.endswith(B) else matrix

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _write_trained(self, path: str) -> None:
        """Write only the adapters: the base does not change and is referenced by name."""
        if self.config.lora is None:
            super()._write_trained(path)
        else:
            self._write_adapter(path, checksums=True)

    def _read_trained(self, path: str) -> None:
        if self.config.lora is None:
            super()._read_trained(path)
        else:
            self._read_adapter(path)
