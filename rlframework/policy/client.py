"""The driver's handle of a policy: shards batches over the workers and restores the row order of their results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import abspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import BatchError, ConfigError, DataError, NotSupported
from rlframework.batch.batch_rows import read_count
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packing import TokenCost
from rlframework.config.further_policies import FurtherPolicyConfig
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.model_directories import check_replaceable, model_sizes
from rlframework.interfaces.data_processor import DataProcessor, MicrobatchRule
from rlframework.interfaces.loss import TOKEN_SETS, LossInput, loss_positions, needs_groups
from rlframework.interfaces.named_sharding import policy_sharding
from rlframework.interfaces.policy_worker import BytesMoved, PolicyWorker, Rows, SamplingBound
from rlframework.interfaces.worker_group import WorkerGroup, WorkerSpec
from rlframework.plugins.types import CAPABILITY_OF_FORM, Capability, Record
from rlframework.policy.balancer import BatchBalancer
from rlframework.policy.batch_checks import (
    BatchLimits,
    changed_attributes,
    check_groups,
    check_loss,
    detached,
    require_batch,
)
from rlframework.policy.checkpoint.saved import require_checkpoint
from rlframework.policy.engine import require_head, require_head_of
from rlframework.policy.optimization import resolve_total_steps
from rlframework.workers.remote_calls import WorkerCalls, remote

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.interfaces.loss import LossFunction
    from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)


def _moved(moved: list[BytesMoved]) -> BytesMoved:
    """The bytes moved by all workers."""
    return {"model": sum(each["model"] for each in moved), "optimizer": sum(each["optimizer"] for each in moved)}


def _paths(of_ranks: list[str | None]) -> list[str]:
    """The paths of the ranks that wrote one."""
    return [path for path in of_ranks if path is not None]


def _joined(shards: list[Rows]) -> Rows:
    """The rows of all shards."""
    rows: Rows = BatchedDataDict.from_batches(shards)
    return rows


class Policy:
    """The driver's handle of a model, on the configured worker group and backend: of the policy that a run trains.

    With `config.of(name)` it is the handle of a further policy.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        manager: PluginManager,
        *,
        device: str = "cpu",
        init_reference_model: bool = False,
        init_optimizer: bool = True,
        training_calls: int | None = None,
    ) -> None:
        """Start the workers on `device`, "cpu" or "cuda".

        `training_calls`: how often `train` will be called, which the learning-rate schedule spans (default:
        `algorithm.num_steps`). Raises `NotSupported` if the backend does not declare what the run needs.
        """
        record = manager.select("policy_worker", config.policy.backend).record
        if config.policy.head != "language":
            require(record, Capability.SCORING, f"policy.head={config.policy.head} was requested")
        if init_reference_model:
            require(
                record, Capability.REFERENCE_MODEL, f"algorithm.name={config.algorithm.name} needs a reference policy"
            )
        self.config = config
        processor = manager.load(manager.select("data_processor", config.policy.data_processor).record)
        self._processor: DataProcessor = processor(config=config.policy.batching)
        self.record, self.capabilities = record, record.capabilities
        self._warned_of_state = self._warned_of_skipped = False
        self._has_optimizer, self.has_reference = init_optimizer, init_reference_model
        group = self._choose_group_class(manager.load(manager.select("worker_group", config.worker_group.name).record))
        spec = self._wrap_spec(
            worker_spec(
                config,
                tokenizer,
                manager,
                init_reference_model=init_reference_model,
                init_optimizer=init_optimizer,
                training_calls=training_calls,
            )
        )
        sharding = policy_sharding(config.worker_group.num_workers, config.policy.parallelism)
        self.worker_group: WorkerGroup = group(spec, config.worker_group, sharding=sharding, device=device)
        self._calls = WorkerCalls(self.worker_group)

    def _choose_group_class(self, chosen: type[WorkerGroup]) -> type[WorkerGroup]:
        return chosen  # subclasses may replace the configured one

    def _wrap_spec(self, spec: WorkerSpec) -> WorkerSpec:
        return spec  # subclasses may wrap the workers

    @cached_property
    def _balancer(self) -> BatchBalancer:
        """The balancer, with the workers' own microbatch settings, which are requested once."""
        config = self.config.policy
        info = self.get_info()[0]
        hidden, _ = model_sizes(config.model_name, config.trust_remote_code)
        rule: Any = {name: info[name] for name in ("pad_multiple", "few_shapes", "packs_media") if name in info}
        return BatchBalancer(
            self.data_parallel_size,
            self._processor.batching(info.get("batching", "padded")),
            info.get("preferred_tokens", 8192),
            TokenCost() if hidden is None else TokenCost.for_hidden_size(hidden),
            MicrobatchRule(**rule),
        )

    @cached_property
    def _limits(self) -> BatchLimits:
        return BatchLimits.of(self.config.policy)

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks, over which batches are sharded."""
        return self.worker_group.sharding.get_axis_size("data_parallel")

    def train(
        self,
        data: Rows,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        sampling_bound: SamplingBound | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per `gbs` rows of `data` (default: `policy.train_global_batch_size`).

        Returns the result of `PolicyWorker.train` for the whole batch, plus `loss`, the mean over global batches; see
        there for `sampling_bound`. Raises a `BatchError`, before a worker gets anything, for rows that are not as
        `PolicyWorker` describes, that lack what the loss reads, or that do not divide into global batches, or these
        over the workers; and for groups, if the loss needs them, that are in several global batches or do not fit into
        a microbatch.
        """
        columns = check_loss(loss_fn)
        require_head_of(self.config.policy, loss_fn)
        if not (eval_mode or self._has_optimizer):
            raise NotSupported("this policy was built without an optimizer; build it with init_optimizer=True to train")
        require_batch("train", data)
        data = detached(data)
        self._limits.check(data, columns, token_sets=loss_fn.input_type == LossInput.TOKEN_SETS)
        gbs = read_count(self.config.policy.train_global_batch_size if gbs is None else gbs, "gbs", least=1)
        mbs = None if mbs is None else read_count(mbs, "mbs", least=1)
        if data.size % gbs:
            raise BatchError(
                f"{data.size} rows do not divide into global batches of {gbs}; pass a multiple of {gbs} rows"
            )
        if gbs % self.data_parallel_size:
            raise BatchError(
                f"a global batch of {gbs} rows does not divide over {self.data_parallel_size} data-parallel workers"
            )
        grouped_rows = None
        if needs_groups(loss_fn):
            check_groups(data, gbs, self.data_parallel_size)
            grouped_rows = mbs or self.config.policy.train_micro_batch_size
        tokens = self.config.policy.batching.tokens
        shards, _ = self._balancer.shard(
            data, batch_size=gbs, positions=loss_positions(loss_fn), tokens=tokens, grouped_rows=grouped_rows
        )
        bound: dict[str, Any] = {} if sampling_bound is None else {"sampling_bound": sampling_bound}
        before = dict(getattr(loss_fn, "__dict__", {}))
        results = self._calls.on_shards(
            PolicyWorker.train, shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs, **bound
        )
        if before and (changed := changed_attributes(before, loss_fn)) and not self._warned_of_state:
            self._warned_of_state = True
            _LOG.warning(
                "%s changes its attribute %r when it is called, which workers in other processes do with a copy that "
                "is then lost: a loss must keep no state. Let it return metrics, or read columns of the batch",
                type(loss_fn).__name__,
                changed[0],
            )
        if results[0]["skipped"] and not self._warned_of_skipped:
            self._warned_of_skipped = True
            _LOG.warning(
                "the gradient of %d of %d optimizer steps was not finite (loss %s), so they were skipped; the weights "
                "are as before. Later ones are only counted, in `skipped`",
                results[0]["skipped"],
                data.size // gbs,
                float(results[0]["global_loss"].mean()),
            )
        times = {name: max(each["times"].get(name, 0.0) for each in results) for name in results[0]["times"]}
        counted = all("flops" in each for each in results)
        flops = {"flops": sum(each["flops"] for each in results)} if counted else {}
        return {**results[0], **flops, "times": times, "loss": float(results[0]["global_loss"].mean())}

    get_logprobs = remote(PolicyWorker.get_logprobs, _joined)
    get_topk_logits = remote(PolicyWorker.get_topk_logits, _joined)
    get_token_set_logprobs = remote(PolicyWorker.get_token_set_logprobs, _joined)
    get_values = remote(PolicyWorker.get_values, _joined)
    get_reference_policy_logprobs = remote(PolicyWorker.get_reference_policy_logprobs, _joined)
    score = remote(PolicyWorker.score, _joined)
    """Return `scores [B]` of a reward model, in order: see `PolicyWorker.score`."""

    def _split(
        self, method: Callable[..., Rows], data: Rows, options: Mapping[str, Any]
    ) -> tuple[Sequence[Rows], Callable[[Rows], Rows]]:
        """Check `data` and return the shards of what scoring reads of it, and a function that restores their order."""
        head = {PolicyWorker.score: "score", PolicyWorker.get_values: "value"}.get(method, "language")
        if head == "score":
            require(self.record, Capability.SCORING, "score was called")
        require_head(self.config.policy, head, method.__name__)
        if method is PolicyWorker.get_reference_policy_logprobs and not self.has_reference:
            raise NotSupported("this policy keeps no reference weights; build it with init_reference_model=True")
        require_batch(method.__name__, data)
        data = detached(data)
        if options["micro_batch_size"] is not None:
            read_count(options["micro_batch_size"], "micro_batch_size", least=1)
        if "k" in options:
            read_count(options["k"], "k", 1, self._limits.vocabulary or math.inf)
        sets = method is PolicyWorker.get_token_set_logprobs
        read = ("input_ids", "input_lengths", "token_mask", "sample_mask", *((TOKEN_SETS,) if sets else ()))
        keys = [key for key in read if key in data]
        inputs: Rows = BatchedDataDict({key: data[key] for key in keys} | data.get_multimodal_dict())
        self._limits.check(inputs, token_sets=sets)
        rows, ranks = data.size, self.data_parallel_size
        if rows % ranks:  # repeat the first rows: every worker needs the same number
            inputs = inputs.select_indices(torch.arange(rows + -rows % ranks) % rows)
        positions, batching = options.get("positions", "last"), self.config.policy.batching
        tokens = batching.logprob_tokens or batching.tokens
        shards, order = self._balancer.shard(inputs, batch_size=None, positions=positions, tokens=tokens)

        def restored(scored: Rows) -> Rows:
            if order is not None:
                scored.reorder_data(order)
            return scored.slice(0, rows)

        return shards, restored

    # -- calls of all workers at once: see `PolicyWorker` -------------------------------------------------------------

    load_adapter = remote(PolicyWorker.load_adapter)
    finish_checkpoint = remote(PolicyWorker.finish_checkpoint)
    checkpoint_written = remote(PolicyWorker.checkpoint_written, all)
    """Return True if all workers have written their shards, so that `finish_checkpoint` does not wait."""
    get_info = remote(PolicyWorker.get_info)
    get_gpu_info = remote(PolicyWorker.get_gpu_info)
    report_device_ids = remote(PolicyWorker.report_device_id)
    reset_peak_memory_stats = remote(PolicyWorker.reset_peak_memory_stats)
    start_profiling = remote(PolicyWorker.start_profiling)
    stop_profiling = remote(PolicyWorker.stop_profiling, _paths)
    """Write the traces to `folder`, shared by workers and driver, and return their paths, by rank."""
    start_gpu_profiling = remote(PolicyWorker.start_gpu_profiling)
    stop_gpu_profiling = remote(PolicyWorker.stop_gpu_profiling)
    prepare_for_training = remote(PolicyWorker.prepare_for_training, _moved)
    prepare_for_lp_inference = remote(PolicyWorker.prepare_for_lp_inference, _moved)
    offload_before_refit = remote(PolicyWorker.offload_before_refit, _moved)
    offload_after_refit = remote(PolicyWorker.offload_after_refit, _moved)

    def load_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, reference_path: str | None = None
    ) -> None:
        """See `PolicyWorker.load_checkpoint`. Raises `DataError` for a folder that does not exist."""
        paths = {"weights_path": weights_path, "optimizer_path": optimizer_path, "reference_path": reference_path}
        folders = {name: abspath(path) for name, path in paths.items() if path}
        for name, path in folders.items():
            if not Path(path).is_dir():
                raise DataError(f"{name}: there is no folder {path}")
        if (Path(weights_path) / "run.json").is_file():
            raise DataError(f"{weights_path} is the checkpoint of a run; give its folders model and optimizer")
        require_checkpoint(Path(weights_path), optimizer_path)
        self._calls.on_all(PolicyWorker.load_checkpoint, **folders)

    def save_pretrained(self, path: str, *, replace: bool = False) -> None:
        """Write a Hugging Face directory; see `PolicyWorker.save_pretrained`.

        Raises `UserError` if `path` exists and holds files that no save wrote, unless `replace`: these are then lost.
        """
        self._save(PolicyWorker.save_pretrained, path, replace)

    def save_adapter(self, path: str, *, replace: bool = False) -> None:
        """Write the adapters; see `PolicyWorker.save_adapter`, and `save_pretrained` for `replace`."""
        self._save(PolicyWorker.save_adapter, path, replace)

    def _save(self, method: Callable[..., None], path: str, replace: bool) -> None:
        if not replace:
            check_replaceable(path)
        self._calls.on_all(method, path=abspath(path))  # workers have the directory that they were started in

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None,
        *,
        form: str = "portable",
        asynchronous: bool = False,
        reference_path: str | None = None,
    ) -> None:
        """Write the state that training resumes from; see `PolicyWorker.save_checkpoint`.

        Raises `UserError` if one of the paths exists and holds files that no save wrote.
        """
        if form in CAPABILITY_OF_FORM:
            require(self.record, CAPABILITY_OF_FORM[form], f"a {form} checkpoint was requested")
        for path in filter(None, (weights_path, optimizer_path, reference_path)):
            check_replaceable(path)
        self._calls.on_all(
            PolicyWorker.save_checkpoint,
            weights_path=abspath(weights_path),
            optimizer_path=optimizer_path and abspath(optimizer_path),
            form=form,
            asynchronous=asynchronous,
            **({} if reference_path is None else {"reference_path": abspath(reference_path)}),
        )

    def sync_reference(self, alpha: float) -> None:
        """Move the reference toward the policy, `alpha` above 0 to 1: see `PolicyWorker.sync_reference`."""
        if not 0.0 < alpha <= 1.0:
            raise ConfigError(f"alpha is {alpha}; it must be above 0 and at most 1")
        if not self.has_reference:
            raise NotSupported("this policy keeps no reference weights; build it with init_reference_model=True")
        self._calls.on_all(PolicyWorker.sync_reference, alpha=alpha)

    def rest(self) -> None:
        """Offload the model until the next call needs it, if its section has `offload_when_idle`."""
        if getattr(self.config.policy, "offload_when_idle", False):
            self.offload_after_refit()

    def shutdown(self) -> bool:
        """Stop the workers; return False if one did not shut down cleanly."""
        return self.worker_group.shutdown(cleanup_method="shutdown")

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def worker_spec(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    manager: PluginManager,
    *,
    init_reference_model: bool,
    init_optimizer: bool,
    training_calls: int | None = None,
) -> WorkerSpec:
    """The specification that each worker of the policy in `config` is started with; see `Policy` for the arguments."""
    record = manager.select("policy_worker", config.policy.backend).record
    if getattr(config.policy, "offload_when_idle", False):
        require(record, Capability.CPU_OFFLOAD, "policy.offload_when_idle=true moves the model to CPU memory")
    neutral = {name: getattr(config.policy, name) for name in PolicyConfig.model_fields}
    if calls := training_calls or config.algorithm.num_steps:  # 0: with `num_epochs`, where nothing is trained
        neutral["scheduler"] = resolve_total_steps(config.policy.scheduler, calls)
    section = getattr(config.policy, config.policy.backend, None)
    embeds = Capability.EMBEDDED_GENERATION in record.capabilities and config.generation.workers is None
    generates = embeds and not isinstance(config.policy, FurtherPolicyConfig)
    engine = manager.select("generation_engine", config.generation.name).record.target if generates else None
    return WorkerSpec(
        target=record.target,
        part=(record.kind, record.name),
        kwargs={
            "config": PolicyConfig(**neutral),
            "tokenizer": tokenizer,
            "init_optimizer": init_optimizer,
            "init_reference_model": init_reference_model,
            "backend_config": None if section is None else section.model_dump(),
            "generation": config.generation,
            "generation_target": engine,
            "processor_target": manager.select("data_processor", config.policy.data_processor).record.target,
        },
        plugins=tuple(config.plugins),
        fingerprint=manager.fingerprint(),
        py_executable=record.py_executable,
    )


def require(record: Record, capability: Capability, reason: str) -> None:
    """Raise `NotSupported` unless the backend of `record` declares `capability`."""
    if capability not in record.capabilities:
        raise NotSupported(
            f"{reason}, but the backend {record.name!r} does not declare {capability}; choose a policy.backend that "
            "does: see `rlframework plugins`"
        )
