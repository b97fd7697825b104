"""Mutants are found by name, and none is imported before somebody asks for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlframework.policy.engine import ShardedState, TensorShard, WeightSpec
from rlframework_conformance import mutants
from rlframework_conformance.measure import MutantNotApplicable
from rlframework_conformance.mutants import MODULES, find_mutant, mutants_of
from rlframework_conformance.mutants.mutant import around, together
from rlframework_conformance.mutants.policy_worker.engine_access import norm_of_own_shards, optimizer_of


@pytest.mark.parametrize("kind", MODULES)
def test_each_mutant_is_found_by_its_name(kind):
    assert mutants_of(kind)
    assert all(find_mutant(kind, name) is mutant for name, mutant in mutants_of(kind).items())
    with pytest.raises(KeyError, match="no_such_mutant"):
        find_mutant(kind, "no_such_mutant")


def test_each_module_with_mutants_is_listed():
    folder = Path(mutants.__file__).parent
    imported = re.compile(r"^from rlframework_conformance\.mutants\.mutant import .*\bmutant\b", re.MULTILINE)
    makes = [path for path in folder.rglob("*.py") if imported.search(path.read_text())]
    found = {".".join(path.relative_to(folder).with_suffix("").parts) for path in makes}
    assert found <= {module for modules in MODULES.values() for module in modules}


@pytest.mark.slow
def test_finding_a_mutant_imports_its_module_only():
    code = (
        "import sys\nfrom rlframework_conformance import PolicyWorkerSuite\n"
        "def loaded():\n"
        "    prefix = 'rlframework_conformance.mutants'\n"
        "    return sorted(name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix))\n"
        "print(loaded())\nfrom rlframework_conformance.mutants import find_mutant\nprint(loaded())\n"
        "assert find_mutant('data_processor', 'counts_never_zero').name == 'counts_never_zero'\nprint(loaded())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "[]",
        "['', '.mutant']",
        "['', '.data_processor', '.data_processor.contents', '.mutant']",
    ]


def test_mutants_that_need_a_capability_are_left_out_where_it_is_missing():
    from rlframework.plugins.types import Capability, GenerationEngineRecord
    from rlframework_conformance.mutants.proof import MutantProof

    class Proof(MutantProof):
        kind = "generation_engine"

    embedded = frozenset({Capability.EMBEDDED_GENERATION})
    without, with_it = (
        {
            mutant.name: mutant
            for mutant, _ in Proof.cases(GenerationEngineRecord("x", "x:X", 2, capabilities=one), "cpu")
        }
        for one in (frozenset(), embedded)
    )
    assert not any(mutant.needs for mutant in without.values())
    assert {"tied_head_stale", "stale_prefix_cache"} <= with_it.keys() - without.keys()


def test_a_mutant_of_an_optimizer_that_an_engine_lacks_says_so() -> None:
    with pytest.raises(MutantNotApplicable, match="Optimizer among the attributes of the engine, and there is none"):
        optimizer_of(SimpleNamespace(module=None))


def _engine_with_rows(rows: int) -> SimpleNamespace:
    """An engine whose rank has the first `rows` of a weight of shape [4, 3], with a gradient of ones."""
    weight = torch.ones(4, 3)
    return SimpleNamespace(
        gradients={"weight": weight},
        weight_specs=lambda: {"weight": WeightSpec((4, 3), weight.dtype)},
        sharded_state=lambda: ShardedState([TensorShard("weight", weight[:rows], (0, 0), (4, 3))]),
    )


def test_the_norm_of_own_shards_is_that_of_a_rank() -> None:
    assert norm_of_own_shards(_engine_with_rows(2)) == pytest.approx(6**0.5)


def test_a_mutant_of_the_norm_of_own_shards_says_so_where_a_rank_has_all_weights() -> None:
    with pytest.raises(MutantNotApplicable, match="each rank has all weights in this layout"):
        norm_of_own_shards(_engine_with_rows(4))


class _Engine:
    def name(self) -> str:
        return "engine"


class _Service:
    def name(self) -> str:
        return "service"


class _Worker:
    engine_class = _Engine

    def __init__(self) -> None:
        self.engine, self.training = self.engine_class(), SimpleNamespace()
        self._add_services()

    def _add_services(self) -> None:
        self.service = _Service()

    def name(self) -> str:
        return "worker"

    def names(self) -> list[str]:
        return [self.name(), self.engine.name(), self.service.name()]


@pytest.mark.parametrize("broken", [_Worker, _Engine, _Service])
def test_around_changes_the_object_of_a_worker_that_has_the_method(broken) -> None:
    change = around(broken.name)(lambda call, part: f"no {call()}")
    sound = [_Worker, _Engine, _Service]
    assert change(_Worker)().names() == [f"no {each().name()}" if each is broken else each().name() for each in sound]
    assert _Worker().names() == ["worker", "engine", "service"]


def test_changes_together_apply_from_the_first_to_the_last() -> None:
    changes = (around(_Engine.name)(lambda call, part, word=word: f"{word} {call()}") for word in ("inner", "outer"))
    assert together(*changes)(_Worker)().engine.name() == "outer inner engine"


def test_a_mutant_of_an_object_that_a_worker_lacks_says_so() -> None:
    with pytest.raises(MutantNotApplicable, match="it changes the Path among the attributes of the engine"):
        around(Path.exists)(lambda call, part: call())(_Worker)()
