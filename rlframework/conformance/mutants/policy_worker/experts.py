"""Bugs of mixtures of experts, against contracts 2, 3 and 5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rlframework.conformance.layouts import Layout
from rlframework.conformance.mutants.mutant import mutant
from rlframework.conformance.mutants.policy_worker.engine_access import module_of

SPREAD = Layout(data=2, expert=2)
LEARN = "test_experts_learn_as_the_oracles"
ROUTERS = "test_the_router_loss_is_of_the_whole_batch"
NAMES = "test_experts_are_saved_by_the_names_of_files"
GOING_ON = "test_experts_go_on_from_a_checkpoint"


def _scaled_gradients(part: str, factor: float) -> Any:
    """A worker that multiplies the gradients of the parameters with `part` in their name by `factor`."""

    def break_it(worker_class: Any) -> Any:
        class Broken(worker_class):  # type: ignore[misc]
            def clip_and_step(self, max_grad_norm: Any, lr: float) -> Any:
                for name, parameter in module_of(self).named_parameters():
                    if part in name and parameter.grad is not None:
                        parameter.grad.mul_(factor)
                return super().clip_and_step(max_grad_norm, lr)

        return Broken

    return break_it


experts_gradient_of_each_rank = mutant(
    "experts_gradient_of_each_rank",
    "the gradient of experts, which is of the tokens of all ranks already, is multiplied by their number once more",
    LEARN,
    layout=SPREAD,
)(_scaled_gradients(".experts.", 2.0))

routers_that_do_not_learn = mutant(
    "routers_that_do_not_learn", "no gradient gets from the weights of the chosen experts to the router", LEARN, ROUTERS
)(_scaled_gradients(".mlp.gate.", 0.0))


@mutant("router_loss_left_out", "the weight of the routers' loss is ignored", ROUTERS)
def router_loss_left_out(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            worker: Any = self
            worker.config = worker.config.model_copy(update={"router_aux_loss_coef": 0.0})
            super().build(init_optimizer=init_optimizer)

    return Broken


@mutant("router_loss_of_a_microbatch", "the shares of the first microbatch stand for those of the batch", ROUTERS)
def router_loss_of_a_microbatch(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def build(self, *, init_optimizer: bool) -> None:
            super().build(init_optimizer=init_optimizer)
            routers = self._router_loss
            if routers is not None:
                whole = routers.balance

                def balance(microbatches: Any, forward: Any) -> Any:
                    first, all_ = whole(microbatches[:1], forward), whole(microbatches, forward)
                    return type(all_)(first.share, all_.tokens)

                routers.balance = balance

    return Broken


def _other(name: str) -> str:
    """Of an expert's gate the name of its other projection, and the other way round; else `name`."""
    if ".experts." not in name:
        return name
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    path, kind, weight = name.rsplit(".", 2)
    return ".".join((path, swapped.get(kind, kind), weight))


@mutant("gate_and_up_exchanged", "files have the halves of an expert's first weight under each other's name", NAMES)
def gate_and_up_exchanged(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
            for name, weight in super().gather_weights([_other(name) for name in names]):
                yield _other(name), weight

    return Broken


@mutant("moments_of_another_half", "moments of an expert's gate and up are under each other's name", GOING_ON)
def moments_of_another_half(worker_class: Any) -> Any:
    """See its `bug`."""

    class Broken(worker_class):  # type: ignore[misc]
        def gather_moments(self) -> Iterator[tuple[str, Any]]:
            for name, moments in super().gather_moments():
                yield _other(name), moments

    return Broken
