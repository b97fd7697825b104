"""Run as a program: four gloo ranks that hold models of megatron-core by our converters, and say what is not right.

    megatron_ranks.py FOLDER CASE...    a case: MODEL:LAYOUT:PRECISION:OPTIMIZER, such as tied:tensor=2:bf16:distributed

Prints a line of JSON: the complaints of each case, by rank. What is right is told by torch's AdamW on whole weights,
with gradients that are cut for each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import tell
from torch import Tensor

from rlframework.config.policy import PolicyConfig
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.saved import FIRST, SECOND, SavedTensors
from rlframework.policy.engine import Moments
from rlframework_megatron import cpu
from rlframework_megatron.config import MegatronConfig
from rlframework_megatron.gathering import Groups, local_coordinates
from rlframework_megatron.model import build_chunks
from rlframework_megatron.moments import gather_moments, load_moments, sharded_state
from rlframework_megatron.names import weight_shapes
from rlframework_megatron.parallel import Groups as Ranks
from rlframework_megatron.parallel import Sizes
from rlframework_megatron.state import load_from_folder
from rlframework_megatron.upstream import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    quiet,
)
from rlframework_megatron.weights import LocalModel, gather_weights, load_weights, restore, snapshot, weight_specs

WORLD = 4
LR, DECAY = 1e-2, 0.1
CPU = torch.device("cpu")


class Case:
    """One model in one layout on this rank. `complaints` is what went wrong."""

    def __init__(self, folder: Path, words: str) -> None:
        from transformers import AutoConfig

        model, layout, precision, optimizer = words.split(":")
        self.folder, self.complaints = folder / model, []
        self.config = AutoConfig.from_pretrained(self.folder)
        sizes = {axis: int(size) for axis, size in (shard.split("=") for shard in layout.split(",") if shard)}
        model_size = sizes.get("tensor", 1) * sizes.get("pipeline", 1)
        self.ranks = Ranks(WorkerContext(dist.get_rank(), WORLD), CPU, Sizes(data=WORLD // model_size, **sizes))
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.optimizer = optimizer
        self.steps = 0
        with SavedTensors(self.folder) as saved:
            self.whole = {name: saved[name] for name in weight_shapes(self.config)}

    def say(self, right: bool, what: str) -> None:
        if not right:
            self.complaints.append(what)

    # -- Megatron's side ----------------------------------------------------------------------------------------------

    def build(self) -> None:
        section, coordinates = MegatronConfig(virtual_pipeline=self.ranks.sizes.virtual), local_coordinates()
        policy = PolicyConfig(model_name=str(self.folder))
        chunks = build_chunks(self.config, policy, section, self.ranks, coordinates)
        chunks = [chunk.to(self.dtype) for chunk in chunks]
        made = None
        if self.optimizer != "none":
            distributed = self.optimizer == "distributed"
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, bucket_size=500
            )
            models = [DistributedDataParallel(config=one.config, ddp_config=settings, module=one) for one in chunks]
            few = ParamPredicate(name="few", fn=lambda parameter: parameter.ndim < 2)
            own = OptimizerConfig(
                optimizer="adam",
                lr=LR,
                weight_decay=DECAY,
                clip_grad=0.0,
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
                use_distributed_optimizer=distributed,
            )
            overrides = {ParamKey(predicate=few): {"wd_mult": 0.0}}
            made = get_megatron_optimizer(own, models, config_overrides=overrides, use_gloo_process_groups=False)
            for group in made.param_groups:
                group["weight_decay"] = DECAY * group["wd_mult"]
        self.local_model = LocalModel(self.config, coordinates, chunks, Groups.current(CPU), made)

    def step(self) -> None:
        """Take one step; all ranks have the same whole gradients, each applies its shards."""
        gradients = gradients_of(self.config, self.steps)
        for parameter, shards in self.local_model.parameters():
            parameter.main_grad.zero_()
            for shard in shards:
                for whole, local_slices in shard.regions:
                    parameter.main_grad[local_slices] = gradients[shard.name][whole]
        self.local_model.optimizer.prepare_grads()
        self.local_model.optimizer.step_with_ready_grads()
        self.steps += 1

    # -- gathered state -----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in gather_weights(self.local_model, weight_specs(self.config))}

    def moments(self) -> dict[str, Moments]:
        told = gather_moments(self.local_model)
        return {name: Moments(one.steps, one.exp_avg.clone(), one.exp_avg_sq.clone()) for name, one in told}

    def pieces(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Assemble whole tensors from all ranks' shards; complain if they overlap or leave gaps."""
        state = sharded_state(self.local_model)
        own = [
            (piece.name, piece.offset, piece.shape, piece.local.clone()) for piece in (*state.weights, *state.moments)
        ]
        every: list[Any] = [None] * WORLD
        dist.all_gather_object(every, (own, dict(state.steps)))
        found, seen, counts = {}, {}, {}
        for told, steps in every:
            counts |= steps
            for name, offset, shape, local in told:
                box = (name, offset, tuple(local.shape))
                target = found.setdefault(name, torch.full(shape, torch.nan))
                where = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
                if box in seen:
                    self.say(same(seen[box], local), f"two ranks tell {box} otherwise")
                else:
                    self.say(bool(target[where].isnan().all()), f"{box} overlaps another shard")
                seen[box] = target[where] = local
        return found, counts


def gradients_of(config: Any, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, the sign of zero included."""
    return one.shape == other.shape and one.dtype == other.dtype == torch.float32 and bits(one).equal(bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


class Reference:
    """torch's AdamW on whole weights."""

    def __init__(self, config: Any, whole: dict[str, Tensor]) -> None:
        self.config = config
        self.parameters = {name: weight.clone().requires_grad_() for name, weight in whole.items()}
        groups = [{"params": [one], "weight_decay": DECAY if one.ndim > 1 else 0.0} for one in self.parameters.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)
        self.steps = 0

    def step(self) -> None:
        for name, gradient in gradients_of(self.config, self.steps).items():
            self.parameters[name].grad = gradient
        self.optimizer.step()
        self.steps += 1

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def moments(self) -> dict[str, Moments]:
        states = ((name, self.optimizer.state[parameter]) for name, parameter in self.parameters.items())
        return {name: Moments(int(one["step"]), one["exp_avg"], one["exp_avg_sq"]) for name, one in states}


# -- the checks -------------------------------------------------------------------------------------------------------


def check_loading(case: Case) -> None:
    case.build()
    load_from_folder(case.local_model, case.folder)
    rounded = case.dtype == torch.bfloat16 and case.optimizer == "none"
    wanted = {name: weight.bfloat16().float() if rounded else weight for name, weight in case.whole.items()}
    found = case.weights()
    case.say(list(found) == list(wanted), "other names, or another order")
    case.say(all(same(found[name], wanted[name]) for name in wanted), "gathered other weights than the files have")
    other = {name: -weight.flip(0) for name, weight in case.whole.items()}
    other["model.norm.weight"][0] = -0.0
    load_weights(case.local_model, other)
    if not rounded:
        found = case.weights()
        case.say(all(same(found[name], other[name]) for name in other), "what was loaded is not what is told")
    load_weights(case.local_model, case.whole)


def check_parameters(case: Case, wanted: dict[str, Tensor]) -> None:
    """The parameters themselves, copies of a tied head and padding too: what the model computes with."""
    every = {parameter for chunk in case.local_model.chunks for parameter in chunk.parameters()}
    case.say(every == {parameter for parameter, _ in case.local_model.parameters()}, "parameters that no weight is in")
    for parameter, shards in case.local_model.parameters():
        expected = torch.zeros(parameter.shape)
        for shard in shards:
            for whole, local_slices in shard.regions:
                expected[local_slices] = wanted[shard.name][whole]
        right = expected.to(case.dtype)
        case.say(torch.equal(parameter.detach(), right), f"the parameter of {shards[0].name} is otherwise")


def check_training(case: Case, reference: Reference) -> None:
    fresh, counts = case.pieces()
    case.say(set(counts.values()) == {0}, "steps before the first")
    case.say(all(not fresh[FIRST + name].any() for name in case.whole), "moments before the first step")
    case.say(all(same(fresh[name], weight) for name, weight in case.whole.items()), "shards are not the weights")
    case.say(all(one.steps == 0 and not one.exp_avg_sq.any() for one in case.moments().values()), "early moments")
    for _ in range(2):
        case.step()
        reference.step()
    compare(case, reference, "after two steps")
    weights, moments = case.weights(), case.moments()
    found, counts = case.pieces()
    case.say(counts == dict.fromkeys(case.whole, 2), f"pieces say {set(counts.values())} steps")
    for name in case.whole:
        case.say(same(found[name], weights[name]), f"pieces of {name}")
        case.say(same(found[FIRST + name], moments[name].exp_avg), f"pieces of the first moment of {name}")
        case.say(same(found[SECOND + name], moments[name].exp_avg_sq), f"pieces of the second moment of {name}")


def compare(case: Case, reference: Reference, when: str) -> None:
    found, moments = case.weights(), case.moments()
    rights, right_moments = reference.weights(), reference.moments()
    for name, right in rights.items():
        case.say(torch.allclose(found[name], right, rtol=1e-5, atol=1e-7), f"{name} {when}")
        told, wanted = moments[name], right_moments[name]
        case.say(told.steps == wanted.steps, f"{told.steps} steps of {name} {when}")
        for kind in ("exp_avg", "exp_avg_sq"):
            close = torch.allclose(getattr(told, kind), getattr(wanted, kind), rtol=1e-5, atol=1e-9)
            case.say(close, f"{kind} of {name} {when}")
    check_parameters(case, found)


def check_snapshots(case: Case) -> None:
    before, kept = case.weights(), snapshot(case.local_model)
    inside = [parameter.detach().clone() for parameter, _ in case.local_model.parameters()]
    load_weights(case.local_model, {name: weight + 1 for name, weight in case.whole.items()})
    case.say(not same(case.weights()["model.norm.weight"], before["model.norm.weight"]), "nothing was loaded")
    restore(case.local_model, kept)
    after = case.weights()
    case.say(all(same(after[name], before[name]) for name in before), "a snapshot came back otherwise")
    held = [parameter.detach() for parameter, _ in case.local_model.parameters()]
    case.say(all(map(torch.equal, held, inside)), "parameters came back otherwise")


def check_resuming(case: Case, reference: Reference) -> None:
    """A new model and optimizer load weights and moments, and continue training."""
    weights, moments = case.weights(), case.moments()
    case.build()
    load_weights(case.local_model, weights)
    load_moments(case.local_model, moments)
    again = case.moments()
    for name, wanted in moments.items():
        case.say(again[name].steps == wanted.steps, f"steps of {name} came back otherwise")
        kept = same(again[name].exp_avg, wanted.exp_avg) and same(again[name].exp_avg_sq, wanted.exp_avg_sq)
        case.say(kept, f"moments of {name} came back otherwise")
    case.step()
    reference.step()
    compare(case, reference, "after going on")


def check(case: Case) -> None:
    check_loading(case)
    check_parameters(case, case.whole)
    check_snapshots(case)
    if case.optimizer != "none":
        reference = Reference(case.config, case.whole)
        check_training(case, reference)
        check_snapshots(case)
        check_resuming(case, reference)


def run(folder: Path, word: str) -> list[str]:
    case = Case(folder, word)
    try:
        with quiet(), cpu.on(CPU):
            check(case)
    finally:
        Ranks.leave()
    return case.complaints


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    tell(WORLD, FOLDER, sys.argv[2:], lambda word, rank: run(FOLDER, word))
