"""A process that calls a worker on the CPU and on the counting device, whose registration others would notice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import counting_device
import counting_modes
import torch

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.sections import GenerationConfig
from rlframework.generation.batch import generate
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_dtensor.worker import DTensorPolicyWorker
from rlframework_transformers.engine import TransformersEngine

ENGINE = "rlframework_transformers.engine:TransformersEngine"
GENERATION = GenerationConfig(max_new_tokens=6, temperature=1.0, refit={"deadline": 20})


def compare(model: Path, rows: BatchedDataDict[Any], settings: dict[str, Any], folder: Path) -> None:
    """Print the largest difference of each result between the CPU and the device, as JSON by name."""
    counting_device.register()
    counting_modes.add_streams()
    expected = results("cpu", model, rows, settings, folder / "cpu")
    with counting_modes.constructing():
        found = results(counting_device.NAME, model, rows, settings, folder / "device")
    print(json.dumps({name: float((found[name] - value).abs().max()) for name, value in expected.items()}))


def results(
    device: str, model: Path, rows: BatchedDataDict[Any], settings: dict[str, Any], folder: Path
) -> dict[str, torch.Tensor]:
    """The results of a worker's calls on `device`, by name."""

    def build() -> DTensorPolicyWorker:
        config = {
            "model_name": str(model),
            "train_global_batch_size": rows.size,
            "train_micro_batch_size": 2,
            **settings,
        }
        context = WorkerContext(device=device)
        return DTensorPolicyWorker(
            config, cases.tokenizer(), context=context, generation=GENERATION, generation_target=ENGINE
        )

    worker, out = build(), dict[str, torch.Tensor]()
    out["logprobs"] = worker.get_logprobs(rows)["logprobs"]
    out["selected"] = worker.get_logprobs(rows, positions="token_mask", entropy=True)["entropy"]
    out["topk"] = worker.get_topk_logits(rows, 3)["topk_logits"]
    out["loss"] = worker.train(rows, NLLLoss())["global_loss"]
    with counting_modes.moving() if device != "cpu" else nullcontext():
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_lp_inference()
        worker.prepare_for_training()
    out["loss after offloading"] = worker.train(rows, NLLLoss())["global_loss"]
    out["reference"] = worker.get_reference_policy_logprobs(rows)["reference_logprobs"]
    out["trained"] = worker.get_logprobs(rows)["logprobs"]
    prompts = BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4], [5, 6, 7, 0]]),
            "input_lengths": torch.tensor([3, 4, 3]),
            "seeds": torch.tensor([1, 2, 3]),
        }
    )
    for name, engine in (
        ("generated", worker.generation.updated()),
        ("generated after a refit", refitted(worker, model, device)),
    ):
        out[name] = generate(engine, prompts, GENERATION, frozenset(), pad_id=0)["output_ids"]
    for form in ("portable", "sharded") if "lora" not in settings else ("portable",):
        paths = str(folder / form / "weights"), str(folder / form / "optimizer")
        worker.save_checkpoint(*paths, form=form)
        resumed = build()
        resumed.load_checkpoint(*paths)
        resumed.train(rows, NLLLoss())
        out[form] = resumed.get_logprobs(rows)["logprobs"]
        resumed.shutdown()
    assert worker.get_gpu_info()["parameter_sample"]
    worker.shutdown()
    return out


def refitted(worker: DTensorPolicyWorker, model: Path, device: str) -> TransformersEngine:
    """An engine on `device` that received the weights of `worker` twice, weight by weight."""
    engine = TransformersEngine(
        GENERATION, cases.tokenizer(), model_name=str(model), device=device, precision="float32"
    )
    for version in range(2):
        engine.begin_weight_update(version, worker.prepare_info_for_collective())
        for name, _size in worker.prepare_weights_for_ipc()[0]:
            engine.update_weights_from_ipc_handles(worker.get_weights_ipc_handles([name]))
        engine.finish_weight_update()
    return engine
