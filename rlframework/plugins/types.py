"""The records that plugins return, the capabilities that they declare, and the problems that their checks report.

Light on purpose: nothing here, and nothing that a `plugin.py` needs to make a record, imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import BaseModel

API_VERSION = 1
"""Version of the plugin API: of the hookspecs, the records and the interfaces that the records name."""


class Capability(StrEnum):
    """What a backend says that it can do. Declared: the conformance suite tests it. Not declared: it is refused."""

    TENSOR_PARALLEL = "tensor_parallel"
    """Each weight of a layer over several workers: `policy.parallelism.tensor`."""
    SEQUENCE_PARALLEL = "sequence_parallel"
    """Activations between those weights too, by tokens: `policy.parallelism.sequence`."""
    CONTEXT_PARALLEL = "context_parallel"
    """Each sequence over several workers: `policy.parallelism.context`."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """Layers in stages: `policy.parallelism.pipeline`."""
    EXPERT_PARALLEL = "expert_parallel"
    """The experts of a mixture over several workers: `policy.parallelism.expert`."""
    DATA_PARALLEL = "data_parallel"
    """Rows over several workers; of a worker group: more workers than one."""
    DYNAMIC_BATCHING = "dynamic_batching"
    """Microbatches of different shapes: `policy.batching.mode=dynamic`."""
    PACKING = "packing"
    """Sequences side by side in one row, kept apart: `policy.batching.mode=packed`."""
    ACTIVATION_CHECKPOINTING = "activation_checkpointing"
    """`policy.activation_checkpointing`."""
    BFLOAT16 = "bfloat16"
    """`policy.precision=bfloat16`, with weights and optimizer in fp32."""
    FLOAT16 = "float16"
    """`policy.precision=float16`, with a loss that is scaled."""
    CPU_OFFLOAD = "cpu_offload"
    """`policy.offload`, and moving what it holds between the device and the CPU."""
    LORA = "lora"
    """Adapters, `policy.lora`, with their files."""
    REFERENCE_MODEL = "reference_model"
    """Keeps the weights that it was built with, for `get_reference_policy_logprobs`."""
    SCORING = "scoring"
    """Reward models, `policy.head=score`, and `score`."""
    EMBEDDED_GENERATION = "embedded_generation"
    """Generates in the trainer's own process."""
    COLLECTIVE_REFIT = "collective_refit"
    """Sends weights over a process group; of a generation engine: takes them."""
    IPC_REFIT = "ipc_refit"
    """Sends weights through memory of the same machine or GPU; of a generation engine: takes them."""
    PORTABLE_OPTIMIZER_STATE = "portable_optimizer_state"
    """Checkpoints of whole tensors, which every backend that declares it goes on from."""
    SHARDED_CHECKPOINTS = "sharded_checkpoints"
    """Checkpoints in pieces, each worker its own: `checkpoints.format=sharded`."""
    NATIVE_CHECKPOINTS = "native_checkpoints"
    """Checkpoints in the engine's own files: `checkpoints.format=native`."""
    LEARNED_POSITIONS = "learned_positions"
    """Models with a table of positions, such as GPT-2."""


CAPABILITY_OF_AXIS: Mapping[str, Capability] = {
    "data": Capability.DATA_PARALLEL,
    "tensor": Capability.TENSOR_PARALLEL,
    "sequence": Capability.SEQUENCE_PARALLEL,
    "context": Capability.CONTEXT_PARALLEL,
    "pipeline": Capability.PIPELINE_PARALLEL,
    "expert": Capability.EXPERT_PARALLEL,
}
"""What splitting a model or its batches takes, by the name of the axis in `policy.parallelism`, and `data`."""

CAPABILITY_OF_FORM: Mapping[str, Capability] = {
    "sharded": Capability.SHARDED_CHECKPOINTS,
    "native": Capability.NATIVE_CHECKPOINTS,
}
"""What a checkpoint takes besides `portable_optimizer_state`, by its form in `checkpoints.format`."""


@dataclass(frozen=True)
class Problem:
    """One thing that a plugin's `check` found: the dotted configuration key, what is wrong with it, and what to do.

    `undeclared`: it asks for a capability that the record does not declare.
    """

    key: str
    message: str
    hint: str = ""
    undeclared: bool = False


@dataclass(frozen=True)
class KnownFailure:
    """A conformance test that a backend is known to fail: test name, exception type name and the reason.

    `layouts`: where, such as `("tensor=2",)`; empty: everywhere.
    """

    test: str
    exception: str
    reason: str
    layouts: tuple[str, ...] = ()


Check = Callable[[Any, str], list[Problem]]
"""`check(config, device)`: the resolved `RunConfig` and "cpu" or "cuda"; light, called before any process starts."""


@dataclass(frozen=True)
class Record:
    """What a registration hook returns: a name for the configuration and where the implementation is.

    `name` is the word in the configuration; `api_version` is the version of the plugin API that the plugin was written
    for, as a number; `target` is the import path `module:Class`, imported only in the process
    that needs it; `config_model` is the pydantic model of the part's own section; `py_executable` names another Python
    for the worker processes (None: the driver's).
    """

    kind: ClassVar[str] = ""

    name: str
    target: str
    api_version: int
    summary: str = ""
    capabilities: frozenset[Capability] = frozenset()
    config_model: type[BaseModel] | None = None
    check: Check | None = None
    py_executable: str | None = None
    known_failures: tuple[KnownFailure, ...] = ()


@dataclass(frozen=True)
class PolicyWorkerRecord(Record):
    """A training engine: `target` implements `rlframework.interfaces.policy_worker.PolicyWorker`."""

    kind: ClassVar[str] = "policy_worker"


@dataclass(frozen=True)
class DataProcessorRecord(Record):
    """`target` implements `rlframework.interfaces.data_processor.DataProcessor`."""

    kind: ClassVar[str] = "data_processor"


@dataclass(frozen=True)
class WorkerGroupRecord(Record):
    """`target` implements `rlframework.interfaces.worker_group.WorkerGroup`."""

    kind: ClassVar[str] = "worker_group"


@dataclass(frozen=True)
class GenerationEngineRecord(Record):
    """`target` implements `rlframework.interfaces.generation.GenerationEngine`."""

    kind: ClassVar[str] = "generation_engine"


@dataclass(frozen=True)
class EnvironmentRecord(Record):
    """`target` implements `rlframework.interfaces.environment.Environment`."""

    kind: ClassVar[str] = "environment"


@dataclass(frozen=True)
class AlgorithmRecord(Record):
    """`target` implements `rlframework.algorithm.Algorithm`."""

    kind: ClassVar[str] = "algorithm"


RECORD_TYPES: tuple[type[Record], ...] = (
    PolicyWorkerRecord,
    DataProcessorRecord,
    WorkerGroupRecord,
    GenerationEngineRecord,
    EnvironmentRecord,
    AlgorithmRecord,
)
