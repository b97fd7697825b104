"""The engine's own module, for weights that come from a trainer with a sharded module or from another process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.base.errors import DataError, RefitError, UserError
from rlframework.huggingface.model_directories import quiet_transformers, read_config
from rlframework.models.file_weights import FileLayout, FileWeight, file_weights
from rlframework.models.loading import auto_class
from rlframework.policy.lora_math import A, B, is_adapter, merge
from rlframework.weight_sync.buffers import WeightInfo
from rlframework.weight_sync.ipc import SharedMemory, move_to_shared_memory
from rlframework.weight_sync.receiver import CollectingSink, WeightSink, listed
from rlframework.workers.process_groups import exhausting


def require_fit(info: WeightInfo, config: Any, model_name: str) -> None:
    """Raise `UserError` unless `info` has the names and shapes of a model of `config`, and floating-point weights.

    For an engine whose loader skips missing names silently.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    expected = {name: weight.shape for name, weight in FileLayout.of(model).weights.items()}
    require_none(
        model_name,
        {
            "missing": expected.keys() - info.keys(),
            "unknown": info.keys() - expected.keys(),
            "with another shape": {name for name in info if tuple(info[name][0]) != expected.get(name, info[name][0])},
            "not floating-point": {name for name, (_, dtype) in info.items() if not dtype.is_floating_point},
        },
    )


def require_none(model_name: str, mistakes: dict[str, Collection[str]]) -> None:
    """Raise `UserError` if there are `mistakes`: the names of weights, by how they are wrong."""
    if any(mistakes.values()):
        described = "; ".join(f"{what}: {listed(sorted(names))}" for what, names in mistakes.items() if names)
        raise UserError(
            f"the weights do not fit the model {model_name!r} ({described}); give all weights under the names that "
            "save_pretrained writes, tied heads once"
        )


class EngineModel(WeightSink):
    """A module built from the model's configuration at the first `load`; later loads copy into it if names match.

    It is the sink of refits whose weights can be written straight into the module. For refits of adapters, it is the
    base model merged with the latest ones. Not supported: sampling with several adapters at the same time.
    """

    def __init__(self, model_name: str, device: str, precision: str) -> None:
        self._model_name, self._device = model_name, torch.device(device)
        self._dtype: torch.dtype = getattr(torch, precision)
        self._module: nn.Module | None = None
        self._names: frozenset[str] = frozenset()
        self._parts: dict[str, FileWeight] = {}
        self._tied: dict[str, list[str]] = {}
        self._targets: dict[str, Tensor] = {}
        self._memory: SharedMemory | None = None
        self._base: dict[str, Tensor] = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Load `weights`, under the names `save_pretrained` writes, and return the module in evaluation mode.

        Missing or unknown names and different shapes raise `UserError`, and the module is dropped. Exhausts `weights`
        in any case, because reading it may be a collective.
        """
        stream = iter(weights)
        current, self._module = self._module, None
        with exhausting(stream):
            targets = {} if current is None else self._views(current)
            if current is not None and self._names and self._names <= set(targets):
                self._copy(targets, stream)
            else:
                current = self._build(stream)
        self._module = current
        return current

    @torch.no_grad()
    def load_adapters(self, adapters: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Merge `adapters` into the model from `model_name` and return the module; keeps the adapted weights in fp32.

        They are named as in `Adapters.adapter_specs`, with the scale included in B. Each weight is merged in fp32 and
        then rounded, as in the trainer. Raises `UserError` if the base model has no such layers.
        """
        given = dict(adapters)
        layers = {name.removesuffix(A) for name in given if name.endswith(A)}
        current, self._module = self._module, None
        if current is None or layers != set(self._base):
            current = self._read_base(layers)
        targets = current.state_dict()
        for layer, base in self._base.items():
            targets[f"{layer}.weight"].copy_(merge(base.to(self._device), given[layer + A], given[layer + B], 1.0))
        self._module = current
        return current

    def _read_base(self, layers: set[str]) -> nn.Module:
        try:
            with quiet_transformers():
                module: Any = auto_class(read_config(self._model_name)).from_pretrained(
                    self._model_name, dtype=torch.float32, trust_remote_code=False
                )
        except (OSError, ValueError, DataError) as error:
            raise DataError(
                f"policy.model_name={self._model_name!r} cannot be read by the generation engine, as "
                f"policy.lora.refit=adapters requires; set policy.lora.refit to merged ({error})"
            ) from error
        weights = module.state_dict()
        if unknown := sorted(layer for layer in layers if f"{layer}.weight" not in weights):
            raise UserError(
                f"received adapters for layers {unknown[:3]}, which the model {self._model_name!r} does not have"
            )
        self._base = {layer: weights[f"{layer}.weight"].clone() for layer in layers}
        self._names, self._memory = frozenset(), None
        return self._place(module.to(self._device, self._dtype))

    def _place(self, module: nn.Module) -> nn.Module:
        """Find out which weights `module` has, and which of them are tied; return it in evaluation mode."""
        self._parts = file_weights(module, module.state_dict())
        self._tied = FileLayout.of(module).other_names
        return module.eval()

    def sink(self, info: WeightInfo, ready: Callable[[nn.Module], None]) -> WeightSink:
        """Return the destination of a refit with weights `info`; it calls `ready(module)` when complete.

        Weights with the names, shapes and dtypes of the current module are written straight into it; others are
        collected and then loaded. A partly written module is unusable until the next refit.
        """
        self._ready = ready
        if all(map(is_adapter, info)):
            return CollectingSink(info, self._device, self._use_adapters)
        self._targets = {}
        if self._module is not None and self._names == set(info):
            views = self._views(self._module)
            if all(name in views and views[name].shape == info[name][0] for name in info):  # or `load` names them
                self._targets = views
                if all(_accepts(views[name], *info[name]) for name in info):
                    return self
        return _CastingSink(info, self._device, self._use, self._dtype, self._targets)

    def _use_adapters(self, adapters: Iterable[tuple[str, Tensor]]) -> None:
        self._serve_with(self.load_adapters(adapters))

    def _use(self, weights: Iterable[tuple[str, Tensor]] | None) -> Mapping[str, Tensor]:
        """Load `weights`, or None if they are in the module already; return the tensors in use, by name."""
        module = self._module if weights is None else self.load(weights)
        assert module is not None
        return self._serve_with(module)

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        return self._targets[name]

    def memory(self) -> SharedMemory | None:
        """See `WeightSink.memory`. Moves the module's parameters and persistent buffers there; None on a GPU."""
        assert self._module is not None
        memory = self._memory
        if self._device.type == "cpu" and not (memory and all(map(memory.contains, self._targets.values()))):
            self._memory = move_to_shared_memory(dict.fromkeys(self._module.state_dict(keep_vars=True).values()))
            self._targets = self._views(self._module)
        return self._memory

    def finish(self) -> Mapping[str, Tensor]:
        """See `WeightSink.finish`."""
        assert self._module is not None
        return self._serve_with(self._module)

    def _serve_with(self, module: nn.Module) -> Mapping[str, Tensor]:
        """Have `module` used from now on, and return its weights.

        Raises `RefitError` if a tied weight, which is sent once, differs under another of its names: with a small
        learning rate, probes would not detect a head that was left behind.
        """
        held = self._views(module)
        for name, others in self._tied.items():
            for other in others:
                if held[other].data_ptr() != held[name].data_ptr() and not torch.equal(held[other], held[name]):
                    raise RefitError(
                        f"the engine's {other!r} is tied to {name!r}, but differs from it after the update: the model "
                        f"{self._model_name!r} does not stay tied in this engine; report a bug"
                    )
        self._ready(module)
        return held

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that were loaded last, under their names in files, tied ones once; shares memory."""
        assert self._module is not None
        held = self._views(self._module)
        return {name: held[name] for name in FileLayout.of(self._module).weights}

    def _views(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights of `module` under their names in files, sharing memory."""
        held = module.state_dict()
        return {name: part.of(held[part.source]) for name, part in self._parts.items()}

    @torch.no_grad()
    def _copy(self, targets: dict[str, Tensor], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy in place, one tensor at a time. Tied weights share one tensor, so loading it once is enough."""
        seen, mismatched = set(), set()
        for name, tensor in weights:
            seen.add(name)
            if name in self._names and targets[name].shape == tensor.shape:
                targets[name].copy_(tensor)
            elif name in self._names:
                mismatched.add(name)
        self._require_match(self._names - seen, seen - self._names, mismatched)

    def _build(self, weights: Iterator[tuple[str, Tensor]]) -> nn.Module:
        """Build with transformers' own loading, which maps names that differ between files and modules."""
        config = read_config(self._model_name)
        given = {name: tensor.detach().to(self._device, self._dtype, copy=True) for name, tensor in weights}
        with quiet_transformers():
            with torch.device("meta"):
                model_class = type(auto_class(config).from_config(config, trust_remote_code=False))
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(given),
                dtype=self._dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
        self._require_match(info["missing_keys"], info["unexpected_keys"], mismatched)
        self._names, self._memory, self._base = frozenset(given), None, {}
        return self._place(module.to(self._device))

    def _require_match(
        self, missing: Collection[str], unexpected: Collection[str], mismatched: Collection[str]
    ) -> None:
        mistakes = {"missing": missing, "unknown": unexpected, "with another shape": mismatched}
        require_none(self._model_name, mistakes)


class _CastingSink(CollectingSink):
    """Collects weights of another process; those of this one are cast to the module's dtype, into it if it exists."""

    def __init__(
        self,
        info: WeightInfo,
        device: torch.device,
        use: Callable[[Iterable[tuple[str, Tensor]] | None], Mapping[str, Tensor]],
        dtype: torch.dtype,
        views: Mapping[str, Tensor],
    ) -> None:
        super().__init__(info, device, use)
        self._use, self._dtype, self._views = use, dtype, views

    @torch.no_grad()
    def copy(self, name: str, weight: Tensor) -> None:
        """See `WeightSink.copy`."""
        if name in self._views:
            self._views[name].copy_(weight)
        else:
            dtype = self._dtype if weight.is_floating_point() else weight.dtype
            self._weights[name] = weight.detach().to(self._device, dtype, copy=True)

    def finish(self) -> Mapping[str, Tensor]:
        """See `WeightSink.finish`."""
        weights, self._weights = self._weights, {}
        return self._use(weights.items() if weights else None)


def _accepts(target: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if a weight of `shape` and `dtype` can be copied into `target` byte by byte."""
    return target.is_contiguous() and (tuple(target.shape), target.dtype) == (shape, dtype)


def cache_argument(model: Any) -> str:
    """Return the name of the argument of `model`, and of the field of its output, that has the cache.

    It is `cache` from transformers 5.24 on.
    """
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in accepted), "cache")


class AdaptedWeights:
    """The base model of an engine, merged with the latest adapters on the CPU as by `EngineModel.load_adapters`."""

    def __init__(
        self, model_name: str, precision: str, device: torch.device, whole: Callable[[WeightInfo], WeightSink]
    ) -> None:
        """Read nothing before the first adapters. `whole(info)`: the engine's destination of whole weights."""
        self._model = EngineModel(model_name, "cpu", precision)
        self._device, self._whole = device, whole

    def sink(self, info: WeightInfo) -> WeightSink:
        """Return the destination of an update of adapters alone, or of whole weights."""
        return CollectingSink(info, self._device, self._load) if all(map(is_adapter, info)) else self._whole(info)

    def _load(self, adapters: Iterable[tuple[str, Tensor]]) -> None:
        """Merge `adapters` into the base, and give the engine all weights."""
        self._model.load_adapters(adapters)
        weights = self._model.weights()
        sink = self._whole({name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()})
        for name, weight in weights.items():
            sink.copy(name, weight)
        sink.finish()
