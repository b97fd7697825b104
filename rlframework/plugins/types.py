"""The records that plugins return, and the capabilities they declare. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel

from rlframework.config.base import Section
from rlframework.config.device_defaults import Default
from rlframework.config.policy import BatchingConfig
from rlframework.config.problems import Problem as Problem  # public here, for the checks of plugins
from rlframework.config.sections import (
    AlgorithmConfig,
    EnvironmentConfig,
    GenerationConfig,
    RunConfig,
    WorkerGroupConfig,
)

API_VERSION = 1
"""Version of the plugin API: the hookspecs, the records and the interfaces that the records refer to.

Kinds of records whose interface has changed since have a later one: `Record.supported_api`.
"""


class Capability(StrEnum):
    """A feature that a plugin declares. The conformance suite tests declared features; others are refused."""

    TENSOR_PARALLEL = "tensor_parallel"
    """Weights of a layer sharded over several workers: `policy.parallelism.tensor`."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """Activations between tensor-parallel regions sharded by tokens: `policy.parallelism.sequence`."""
    CONTEXT_PARALLEL = "context_parallel"
    """Sequences sharded over several workers: `policy.parallelism.context`."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Layers divided into pipeline stages: `policy.parallelism.pipeline`."""
    EXPERT_PARALLEL = "expert_parallel"
    """Experts of a mixture-of-experts model distributed over several workers: `policy.parallelism.expert`."""
    DATA_PARALLEL = "data_parallel"
    """Rows distributed over several workers; for a worker group: more than one worker."""
    DYNAMIC_BATCHING = "dynamic_batching"
    """Microbatches of varying shapes: `policy.batching.mode=dynamic`."""
    PACKING = "packing"
    """Several sequences concatenated in one row without attending to each other: `policy.batching.mode=packed`."""
    ACTIVATION_CHECKPOINTING = "activation_checkpointing"
    """Activation recomputation: `policy.activation_checkpointing`."""
    BFLOAT16 = "bfloat16"
    """`policy.precision=bfloat16`, with weights and optimizer state in fp32."""
    FLOAT16 = "float16"
    """`policy.precision=float16`, with loss scaling."""
    CPU_OFFLOAD = "cpu_offload"
    """`policy.offload`, and moving model and optimizer state between the device and the CPU."""
    MUON = "muon"
    """Muon on whole matrices, in every layout: `policy.optimizer.name=muon`."""
    LORA = "lora"
    """Low-rank adapters and their files: `policy.lora`."""
    MULTIMODAL = "multimodal"
    """Rows with images, for vision-language models, and training of one part: `policy.freeze`; for a generation engine:
    prompts with images."""
    REFERENCE_MODEL = "reference_model"
    """Keeping the initial weights, for `get_reference_policy_logprobs`."""
    SCORING = "scoring"
    """Reward models: `policy.head=score` and the method `score`."""
    EMBEDDED_GENERATION = "embedded_generation"
    """Generation in the trainer's own process; for a generation engine: `attach`."""
    IN_FLIGHT_UPDATE = "in_flight_update"
    """For a generation engine: weight updates while requests are in progress, between `pause` and `resume`."""
    COLLECTIVE_REFIT = "collective_refit"
    """Sending weights over a process group; for a generation engine: receiving them."""
    IPC_REFIT = "ipc_refit"
    """Sending weights through memory shared on one machine or GPU; for a generation engine: receiving them."""
    LORA_REFIT = "lora_refit"
    """For a generation engine: receiving LoRA adapters alone, for a base model it has: `policy.lora.refit=adapters`."""
    PORTABLE_OPTIMIZER_STATE = "portable_optimizer_state"
    """Checkpoints of full tensors, from which every backend with this capability can resume."""
    SHARDED_CHECKPOINTS = "sharded_checkpoints"
    """Checkpoints to which each worker writes its own shards: `checkpoints.format=sharded`."""
    NATIVE_CHECKPOINTS = "native_checkpoints"
    """Checkpoints in the engine's own files: `checkpoints.format=native`."""
    LEARNED_POSITIONS = "learned_positions"
    """Models with learned position embeddings, such as GPT-2."""
    EPISODES = "episodes"
    """For an environment: episodes of several turns, instead of single turns."""


OWN_CAPABILITY = re.compile(r"[A-Za-z0-9_]+:[A-Za-z0-9_]+")
"""The form of a capability that a plugin declares for itself or for other plugins: `prefix:name`."""

CAPABILITY_OF_AXIS: Mapping[str, Capability] = {
    "data": Capability.DATA_PARALLEL,
    "tensor": Capability.TENSOR_PARALLEL,
    "sequence": Capability.SEQUENCE_PARALLEL,
    "context": Capability.CONTEXT_PARALLEL,
    "pipeline": Capability.PIPELINE_PARALLEL,
    "expert": Capability.EXPERT_PARALLEL,
}
"""The capability that each axis of parallelism needs: the axes of `policy.parallelism`, and `data`."""

CAPABILITY_OF_FORM: Mapping[str, Capability] = {
    "sharded": Capability.SHARDED_CHECKPOINTS,
    "native": Capability.NATIVE_CHECKPOINTS,
}
"""The capability that a value of `checkpoints.format` needs besides `portable_optimizer_state`."""


@dataclass(frozen=True)
class KnownFailure:
    """A conformance test that a backend is known to fail: test name, name of the exception type, and reason.

    `layouts` restricts it to layouts such as `("tensor=2",)`; empty: all layouts.
    """

    test: str
    exception: str
    reason: str
    layouts: tuple[str, ...] = ()


Check = Callable[[RunConfig, str], list[Problem]]
"""`check(config, device)` takes the resolved `RunConfig` and "cpu" or "cuda", before any process starts."""


DeviceDefaults = Callable[[RunConfig, str], list[Default]]
"""`device_defaults(config, device)` returns the defaults of the plugin's own keys on "cpu" or "cuda"."""


@dataclass(frozen=True)
class Record:
    """A registered implementation: the name that selects it in the configuration, and where to import it from.

    `target` is the import path `module:Class`, imported only in the process that needs it. `api_version` is the
    version of the plugin API that the plugin was written for. `config_model` is the pydantic model of the plugin's
    section. `py_executable` is the Python executable of the worker processes (None: the driver's).

    `capabilities` are some of the kind's `supported_capabilities`, and any of your own with a prefix, such as
    "acme:sparse_attention" (`OWN_CAPABILITY`): these are listed, and core gives them no meaning.
    """

    kind: ClassVar[str] = ""
    """The kind of record; the hook that returns such records is `rlframework_{kind}s`."""
    key: ClassVar[str] = ""
    """The configuration key that selects a record by name."""
    section: ClassVar[type[Section]] = Section
    """The base class of `config_model`."""
    supported_api: ClassVar[int] = API_VERSION
    """The version of the plugin API for this kind."""
    moving: ClassVar[str] = ""
    """How to move a plugin of an earlier version to this one."""
    supported_capabilities: ClassVar[frozenset[Capability]] = frozenset()
    """The capabilities that apply to this kind."""

    name: str
    target: str
    api_version: int
    summary: str = ""
    capabilities: frozenset[str] = frozenset()
    config_model: type[BaseModel] | None = None
    check: Check | None = None
    device_defaults: DeviceDefaults | None = None
    py_executable: str | None = None
    known_failures: tuple[KnownFailure, ...] = ()


class PolicyWorkerRecord(Record):
    """A training engine: `target` implements `rlframework.interfaces.policy_worker.PolicyWorker`."""

    kind: ClassVar[str] = "policy_worker"
    key: ClassVar[str] = "policy.backend"
    supported_capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability) - {
        Capability.IN_FLIGHT_UPDATE,
        Capability.LORA_REFIT,
        Capability.EPISODES,
    }


class DataProcessorRecord(Record):
    """A data processor: `target` implements `rlframework.interfaces.data_processor.DataProcessor`.

    `config_model` is the section `policy.batching`, with the modes and keys that the processor adds.
    """

    kind = "data_processor"
    key = "policy.data_processor"
    section = BatchingConfig


class WorkerGroupRecord(Record):
    """A worker group: `target` implements `rlframework.interfaces.worker_group.WorkerGroup`."""

    kind = "worker_group"
    key = "worker_group.name"
    section = WorkerGroupConfig
    supported_capabilities = frozenset({Capability.DATA_PARALLEL})


PROBE_BOUNDS: Mapping[str, float] = {"float32": 1e-3, "tf32": 0.02, "float16": 0.05, "bfloat16": 0.3}
"""Default of `GenerationEngineRecord.probe_bounds`.

The kernels of two engines differ by 1e-7 to 3e-5 in fp32, by 0.003 with TF32 and by 0.05 in bfloat16; weights in the
wrong place by 0.5 and more. `rlframework.weight_sync.proof` tightens these by the noise of the run.
"""


@dataclass(frozen=True)
class GenerationEngineRecord(Record):
    """A generation engine: `target` implements `rlframework.interfaces.generation.GenerationEngine`.

    `probe_bounds`: by dtype of the engine's weights, the largest mean difference between its log-probabilities and the
    trainer's for the same weights, over the probes of a refit (`generation.refit.probes`); `tf32` instead of `float32`
    if `policy.tf32` is set. `longest_row(config)` returns the most tokens of a row, prompt and completion, if the
    configuration limits an engine to fewer than the model has positions; None: it does not. `gpus_per_engine(config)`
    returns how many GPUs an engine in a process of its own uses; None: one.
    """

    kind = "generation_engine"
    key = "generation.name"
    section = GenerationConfig
    supported_api = 2
    supported_capabilities = frozenset(
        {
            Capability.EMBEDDED_GENERATION,
            Capability.IN_FLIGHT_UPDATE,
            Capability.COLLECTIVE_REFIT,
            Capability.IPC_REFIT,
            Capability.LORA_REFIT,
            Capability.MULTIMODAL,
        }
    )
    moving = "see the page: Move a generation engine to version 2"

    probe_bounds: Mapping[str, float] = field(default_factory=lambda: PROBE_BOUNDS)
    longest_row: Callable[[GenerationConfig], int | None] | None = None
    gpus_per_engine: Callable[[GenerationConfig], int] | None = None


class EnvironmentRecord(Record):
    """An environment: `target` implements `rlframework.interfaces.environment.Environment`."""

    kind = "environment"
    key = "environment.name"
    section = EnvironmentConfig
    supported_capabilities = frozenset({Capability.EPISODES})


class AlgorithmRecord(Record):
    """An algorithm: `target` implements `rlframework.algorithms.algorithm.Algorithm`."""

    kind = "algorithm"
    key = "algorithm.name"
    section = AlgorithmConfig


RECORD_TYPES: Mapping[str, type[Record]] = {record_type.kind: record_type for record_type in Record.__subclasses__()}
"""The type of the records of each kind."""
