"""Runs that are killed, stopped, interrupted or raced, one fault after the other, end like an undisturbed run.

Each chain is a run of a backend with a worker group: a fault at a moment that the run's own events announce, the
documented exit code and message, nothing left behind, the earlier checkpoints unchanged; then the run goes on from
there to the next fault. At the end weights, optimizer state and metrics are bit for bit those of a run without faults.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from probe_faults import Fault, asynchronous_faults, moment, ray_faults, save_faults, start_faults, step, step_faults
from probe_programs import Program, Programs, command_of, wait_for
from probe_runs import SHARDED, assert_same_run

from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.plugins.configure import config_yaml
from rlframework.policy.checkpoint.manifest import check_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
full = pytest.mark.skipif(not os.environ.get("SOAK_FILE"), reason="make soak runs it")

STEPS = 8
GONE_IN = {"inline": 60.0, "processes": 60.0, "ray": 60.0}
"""Seconds within which everything of a run that ended or was killed has to be gone."""
GROUPS = {
    "inline": ("worker_group.name=inline",),
    "processes": ("worker_group={name: processes, num_workers: 2}",),
    "ray": ("worker_group={name: ray, num_workers: 2}",),
}


class Chain:
    """A run that is started again after each fault."""

    def __init__(self, programs: Programs, run_config: Any, folder: Path, keys: tuple[str, ...], group: str) -> None:
        self.programs, self.folder, self.out, self._group = programs, folder, folder / "run", group
        self.config = folder / "run.yaml"
        off = "algorithm.validation={at_start: false, at_end: false, every: 0}"
        common = ["plugins=[]", "policy.batching.tokens=1024", "checkpoints={every: 1, keep_last: 2}", off]
        common += [f"algorithm.num_steps={STEPS}", "algorithm.loss.name='probe_moments:Announced'"]
        self.config.write_text(config_yaml(run_config("sft", *common, *keys, *GROUPS[group])))

    def whole(self) -> Path:
        """An undisturbed run that keeps all of its checkpoints."""
        program = self.start("checkpoints.keep_last=100", out=self.folder / "whole")
        assert program.wait() == 0, program.output
        assert not program.left(GONE_IN[self._group])
        return self.folder / "whole"

    def suffer(self, fault: Fault) -> Iterator[str]:
        """Go on to the fault; yield what is wrong with how the program ends, what it leaves and what it has saved."""
        program = self.start(*fault.words, saved=self.saved, moment=fault.moment)
        print(fault.name)
        held = program.reached()
        if fault.act is not None:
            fault.act(program, held)
        if (code := program.wait()) != fault.code or not re.search(fault.told, program.output):
            yield f"it ended with {code}, not {fault.code}, or does not say {fault.told!r}:\n{program.output}"
        if found := program.left(GONE_IN[self._group]):
            yield f"left behind: {found}"
        if self.saved != fault.saved:
            yield f"its newest checkpoint is of step {self.saved}, not {fault.saved}"
        yield from differences(self.folder / "whole", self.out)

    def finish(self) -> None:
        """Go on to the end, if the run is not there yet."""
        if self.saved < STEPS:
            program = self.start(saved=self.saved)
            assert program.wait() == 0, program.output

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint, or 0."""
        return max((int(path.name.removeprefix("step-")) for path in checkpoints_in(self.out)), default=0)

    def start(
        self, *words: str, out: Path | None = None, saved: int = 0, moment: Any = None, interpreter: bool = False
    ) -> Program:
        """Start the run, or resume it if a checkpoint is `saved`."""
        out = out or self.out
        begin = ("--resume", out, "--trust-run") if saved else (self.config, "--overwrite", f"output_dir={out}")
        told = ("worker_group.environment={MOMENTS}",) if self._group == "ray" else ()
        where = {"folder": self.folder, "moment": moment, "interpreter": interpreter}
        # what another start of the same run may have changed
        own = (f"algorithm.num_steps={STEPS}", "checkpoints.on_interrupt=true", "fault_tolerance.max_restarts=0")
        return self.programs.start("train", *begin, *own, *words, *told, **where)


def differences(whole: Path, out: Path) -> Iterator[str]:
    """Return the differences, bit for bit, between the checkpoints of a run and those of the undisturbed run."""
    for path in checkpoints_in(out):
        wanted = whole / "checkpoints" / path.name
        for part in ("model", "optimizer"):
            check_files(path / part, required=True)
            left, right = files_of(path / part), files_of(wanted / part)
            yield from (f"{path / part / name} differs" for name in left | right if left.get(name) != right.get(name))
        facts = [json.loads((each / "run.json").read_text()) for each in (path, wanted)]
        for name in ("step", "state", "environment"):
            if facts[0][name] != facts[1][name]:
                yield f"{path}/run.json: {name} differs"


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of the files below `folder`, by relative path, except for an index of shards: it names folders."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if ".metadata" in found:
        del found[".metadata"], found["checksums.json"]
    return found


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    found = Programs()
    yield found
    found.close()


@pytest.fixture
def chain(programs, run_config, tmp_path):
    """`chain(backend, group, *keys)`: a run of eight steps with a checkpoint after each."""
    yield lambda backend, group, *keys: Chain(
        programs, run_config, tmp_path, (f"policy.backend={backend}", *keys), group
    )
    programs.end()


def suffer(chain: Chain, faults: list[Fault], soak: Any) -> None:
    """Do what the module says."""
    soak.figures["inputs"] = len(faults)
    whole = chain.whole()
    wrong = [f"{fault.name}: {each}" for fault in faults for each in chain.suffer(fault)]
    assert not wrong, "\n\n".join(wrong)
    chain.finish()
    assert_same_run(whole, chain.out)
    assert not list(differences(whole, chain.out))


@pytest.mark.thorough
def test_faults_while_shards_are_written(soak, chain):
    suffer(chain("dtensor", "processes", *SHARDED), asynchronous_faults(), soak)


@full
@pytest.mark.parametrize("group", ["inline", "processes"])
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_faults(soak, chain, backend, group):
    suffer(chain(backend, group), [*start_faults(group), *save_faults(group), *step_faults(group)], soak)


@full
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_faults_with_ray(soak, chain, backend):
    suffer(chain(backend, "ray"), ray_faults(), soak)


@full
def test_a_second_run_in_the_folder_changes_nothing(soak, chain):
    """While one trains, and after one that finished between the check of the other and its lock."""
    soak.figures["inputs"] = 4
    own = chain("dtensor", "inline")
    first = own.start(moment=step(2))
    first.reached()
    before = files_of(own.out)
    for words in (("--resume", own.out, "--trust-run"), (own.config, "--overwrite"), (own.config,)):
        second = own.programs.start("train", *words, folder=own.folder)
        assert second.wait() == 2
        assert "another process is running in" in second.output or "it holds a run" in second.output
        assert not second.left(GONE_IN["inline"])
        assert files_of(own.out) == before
    first.go()
    assert first.wait() == 0, first.output

    late = own.programs.start("train", own.config, f"output_dir={own.folder / 'late'}", folder=own.folder,
                              moment=moment(r"^os\.mkdir \S*/late ", "driver"))  # fmt: skip
    late.reached()
    own.out.rename(own.folder / "late")
    before = files_of(own.folder / "late")
    late.go()
    assert late.wait() == 2
    assert "it holds a run" in late.output
    assert {**files_of(own.folder / "late"), ".lock": b""} == {**before, ".lock": b""}
    assert not late.left(GONE_IN["inline"])


@full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_that_ends_while_the_fork_server_imports(soak, chain, number):
    """A new interpreter, as a user starts it: the imports of its workers take seconds."""
    soak.figures["inputs"] = 1
    own = chain("dtensor", "processes")
    program = own.start(interpreter=True)

    def imports() -> bool:
        assert program.code() is None, f"the program ended before its fork server began:\n{program.output}"
        # not the program itself: until its interpreter begins, it has the command line of what it was forked from
        started = [command_of(pid) for pid in program.processes() if pid != program.pid]
        return any("multiprocessing.forkserver" in command for command in started)

    wait_for(imports, "the fork server")
    program.signal(number)
    code, told = {
        signal.SIGKILL: (-9, ""),
        signal.SIGTERM: (143, "terminated\n"),
        signal.SIGINT: (130, "interrupted\n"),
    }[number]
    assert (program.wait(), program.output) == (code, told)
    assert not program.left(60.0)  # a server whose program was killed sees that once its imports are done
