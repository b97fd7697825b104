"""Mixtures of experts: violations of contracts 2, 3 and 5."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlframework.policy.engine import Engine
from rlframework_conformance.layouts import Layout
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.policy_worker.engine_access import module_of

EXPERTS = Layout(data=2, expert=2)


def _scaled_gradients(fragment: str, factor: float) -> Callable[[Any], Any]:
    """Multiply the gradients of parameters whose name contains `fragment` by `factor`."""

    @around(Engine.clip_and_step)
    def clip_and_step(call: Any, engine: Any, *args: Any) -> Any:
        for name, parameter in module_of(engine).named_parameters():
            if fragment in name and parameter.grad is not None:
                parameter.grad.mul_(factor)
        return call(*args)

    return clip_and_step


experts_gradient_of_each_rank = mutant(
    "experts_gradient_of_each_rank",
    "Expert gradients, already summed over all ranks' tokens, are multiplied by the number of ranks.",
    layout=EXPERTS,
)(_scaled_gradients(".experts.", 2.0))

routers_that_do_not_learn = mutant(
    "routers_that_do_not_learn", "The weights of the chosen experts pass no gradient to the router."
)(_scaled_gradients(".mlp.gate.", 0.0))


@mutant("router_loss_left_out", "The configured weight of the load-balancing loss is ignored.")
@around(Engine.build)
def _router_loss_left_out(call: Any, engine: Any, **how: Any) -> None:
    engine.config = engine.config.model_copy(update={"router_aux_loss_coef": 0.0})
    call(**how)


@mutant("router_loss_of_a_microbatch", "The load-balancing loss uses the expert shares of the first microbatch only.")
@around(Engine.build)
def _router_loss_of_a_microbatch(call: Any, engine: Any, **how: Any) -> None:
    call(**how)
    if (routers := engine.router_loss) is not None:
        whole = routers.measure_load

        def measure_load(microbatches: Any, forward: Any) -> Any:
            first, all_ = whole(microbatches[:1], forward), whole(microbatches, forward)
            return type(all_)(first.load, all_.tokens)

        routers.measure_load = measure_load


def _exchanged(name: str) -> str:
    """Exchange an expert's `gate_proj` and `up_proj` in a name; return any other name unchanged."""
    if ".experts." not in name:
        return name
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    path, kind, weight = name.rsplit(".", 2)
    return ".".join((path, swapped.get(kind, kind), weight))


@mutant("gate_and_up_exchanged", "The gate and up projections of experts are saved under each other's names.")
@around(Engine.gather_weights)
def _gate_and_up_exchanged(call: Any, engine: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name, weight in call([_exchanged(name) for name in names]):
        yield _exchanged(name), weight


@mutant(
    "moments_of_another_half", "The moments of an expert's gate and up projections are saved under each other's names."
)
@around(Engine.gather_moments)
def _moments_of_another_half(call: Any, engine: Any) -> Iterator[tuple[str, Any]]:
    for name, moments in call():
        yield _exchanged(name), moments
