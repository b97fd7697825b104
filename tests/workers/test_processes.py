"""The worker group of processes without Ray: normal operation and failures."""

from __future__ import annotations

import importlib
import linecache
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback

import cloudpickle
import pytest
import torch

from rlframework.base.errors import ConfigError, DeadlineExceeded, UnpicklableError, WorkerError
from rlframework.config.sections import DeadlinesConfig, WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import WorkerSpec
from rlframework.workers import machine, processes
from rlframework.workers.processes import ProcessWorkerGroup

pytestmark = pytest.mark.slow

TWO = NamedSharding([0, 1], ["data_parallel"])


def start(sharding=TWO, spec=None, device="cpu", **deadlines):
    config = WorkerGroupConfig(name="processes", num_workers=sharding.size, deadlines=DeadlinesConfig(**deadlines))
    spec = spec or WorkerSpec("probe_workers:Probe", {"word": "hi"})
    return ProcessWorkerGroup(spec, config, sharding=sharding, device=device)


def ask(group, method, **kwargs):
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **kwargs))


def running(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def left_after_a_while(pids):
    until = time.monotonic() + 60
    while running(pids) and time.monotonic() < until:
        time.sleep(0.02)
    return running(pids)


def threads_of_peers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("peer-")]


@pytest.fixture(scope="module")
def group():
    group = start(call=60.0)
    yield group
    assert group.shutdown("shutdown")


@pytest.fixture
def fresh():
    """`fresh(**options)`: a group for a test that ends it."""
    groups = []

    def make(**options):
        groups.append(start(**options))
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()


def test_only_named_variables_are_passed(monkeypatch, fresh):
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    answers = ask(fresh(), "who")
    for answer in answers:
        names = set(answer["environment"])
        assert "SECRET_OF_THE_DRIVER" not in names
        assert answer["environment"]["NCCL_DEBUG"] == "WARN"  # as it is now, not when the fork server began
        assert answer["environment"]["OMP_NUM_THREADS"] == str(machine.threads_per_worker(2))
        passed = {*machine.INHERITED, *machine.FORWARDED, "OMP_NUM_THREADS", "PYTHONPATH", "GLOO_SOCKET_IFNAME"}
        assert all(name in passed or name.startswith(machine.INHERITED_PREFIXES) for name in names)


def test_variables_read_by_imports_are_not_those_of_an_earlier_group(monkeypatch, group):
    monkeypatch.setenv("HF_HOME", "/somewhere/else")
    other = start(NamedSharding([0], ["data_parallel"]))
    (who,) = ask(other, "who")
    assert who["environment"]["HF_HOME"] == "/somewhere/else"
    assert who["torch_imported"] is False  # a new interpreter, not forked from one with its imports done
    assert ask(group, "who")[0]["torch_imported"] is True
    assert other.shutdown()


def test_workers_run_in_the_drivers_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    group = start(NamedSharding([0], ["data_parallel"]), WorkerSpec("probe_workers:Process", {}))
    assert ask(group, "folder") == [str(tmp_path)]
    assert group.shutdown()


def test_shared_arguments_are_pickled_once(group):
    pickled = []

    class Counting:
        def __reduce__(self):
            pickled.append(1)
            return str, ("whole",)

    assert ask(group, "echo", x=Counting()) == [(0, {"x": "whole"}), (1, {"x": "whole"})]
    assert len(pickled) == 1


def test_unpicklable_arguments_reach_no_worker(group):
    with pytest.raises(UnpicklableError, match="must be picklable"):
        group.run_all_workers_sharded_data("echo", in_sharded_axes=["data_parallel"], x=["fine", threading.Lock()])
    assert ask(group, "echo", x=1) == [(0, {"x": 1}), (1, {"x": 1})]
    before = threads_of_peers()  # of groups that other tests share
    with pytest.raises(TypeError, match="must be picklable"):
        start(spec=WorkerSpec("probe_workers:Probe", {"word": threading.Lock()}))
    assert threads_of_peers() == before


CELL = """
class Loss:
    def __call__(self, value):
        return value + missing(HELD)

def missing(held):
    return 1 / 0
"""


@pytest.fixture
def cell(monkeypatch):
    """The variables of a notebook with the cell `CELL`, and the name that the notebook gives to its file."""
    name, variables = "/tmp/ipykernel_1/7.py", {"__name__": "__main__", "HELD": 1}
    exec(compile(CELL, name, "exec"), variables)  # noqa: S102 - our own text
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(keepends=True), name))
    return variables, name


def test_the_traceback_of_a_cells_function_shows_its_lines(cell):
    variables, name = cell
    sent = processes._pickled(variables["Loss"]())
    del linecache.cache[name]  # as in another process
    with pytest.raises(ZeroDivisionError) as error:
        pickle.loads(sent)(2)  # noqa: S301 - pickled above
    shown = "".join(traceback.format_exception(error.value))
    assert f'File "{name}", line 4, in __call__\n    return value + missing(HELD)\n' in shown
    assert f'File "{name}", line 7, in missing\n    return 1 / 0\n' in shown


@pytest.mark.parametrize("form", [lambda loss: loss, lambda loss: ("call", ("train", True, {"loss_fn": loss}))])
def test_the_variable_that_cannot_be_sent_is_named(cell, form):
    variables, _ = cell
    variables["HELD"] = threading.Lock()
    with pytest.raises(TypeError, match=r"must be picklable: .* Loss.__call__ uses the variable 'HELD', a lock$"):
        processes._pickled(form(variables["Loss"]()))


def _keep_class(module, earlier):
    """Give the earlier class the new code, as IPython's autoreload does."""
    earlier.scale.__code__ = module.Loss.scale.__code__
    module.Loss = earlier


@pytest.mark.parametrize("after_reload", [lambda module, earlier: None, _keep_class])
def test_the_code_of_a_module_that_was_reloaded_is_sent(tmp_path, monkeypatch, after_reload):
    """In a worker that imported the module before, the name alone would stand for the earlier code."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes._Pickler, "_sent", {})
    name = f"losses_to_edit_{after_reload.__name__.strip('<>')}"
    file = tmp_path / f"{name}.py"
    file.write_text("class Loss:\n    def scale(self):\n        return 1\n")
    module = importlib.import_module(name)
    earlier = module.Loss
    assert b"scale" not in processes._pickled(earlier())
    file.write_text("class Loss:\n    def scale(self):\n        return 1 + 9  # edited\n")
    importlib.reload(module)
    after_reload(module, earlier)
    sent = processes._pickled(module.Loss())
    monkeypatch.delitem(sys.modules, name)
    file.unlink()
    assert pickle.loads(sent).scale() == 10  # noqa: S301 - pickled above
    cloudpickle.unregister_pickle_by_value(module)


def test_a_result_that_cannot_be_unpickled(fresh):
    with pytest.raises(WorkerError, match="No module named 'only_there'"):
        ask(fresh(), "answer_of_a_class_that_is_only_there")


def test_a_worker_that_dies_while_idle(fresh):
    group = fresh()
    os.kill(ask(group, "who")[0]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^the process of rank 0 of 2 died in echo: .*SIGKILL"):
        ask(group, "echo", x=torch.zeros(2**20))
    group = fresh()
    os.kill(ask(group, "who")[1]["pid"], signal.SIGKILL)
    assert group.shutdown("shutdown") is False


def test_a_worker_that_exits(fresh):
    with pytest.raises(WorkerError, match=r"died in leave: its process ended \(exit code 3\)"):
        ask(fresh(), "leave", code=3)


def test_a_dead_worker_whose_child_keeps_the_connection_open(fresh, tmp_path):
    """The connection stays open, so only the end of the process shows the death."""
    with pytest.raises(WorkerError, match=r"^the process of rank 0 of 2 died in die_forked"):
        ask(fresh(), "die_forked", path=tmp_path / "child")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it was still there


def test_a_worker_that_does_not_read_its_messages(fresh):
    """A stopped process: messages to it stay in the buffer, and the deadline still applies."""
    group = fresh()
    pids = [answer["pid"] for answer in ask(group, "who")]
    os.kill(pids[1], signal.SIGSTOP)
    call = group.run_all_workers_single_data("echo", x=torch.zeros(2**22))
    # when rank 0 has answered the second call, it has answered the first
    group.get_all_worker_results(group.run_single_worker_single_data("who", worker_idx=0))
    group._deadlines = DeadlinesConfig(call=0.5)
    with pytest.raises(DeadlineExceeded, match="from rank 1 of 2; answered: 0"):
        group.get_all_worker_results(call)
    assert running(pids) == []


def test_notices_to_a_stopped_worker_do_not_block(fresh):
    """More notices than a pipe holds (64 KiB), of which nobody reads any; then to a worker that has ended."""
    group = fresh(spec=WorkerSpec("probe_workers:Probe", {"word": "hi"}, notified=True))
    os.kill(ask(group, "who")[1]["pid"], signal.SIGSTOP)
    for _ in range(2**17):
        group.notify()
    group._deadlines = DeadlinesConfig(call=0.5)
    with pytest.raises(DeadlineExceeded):
        ask(group, "who")
    group.notify()


def test_a_worker_that_dies_during_construction():
    spec = WorkerSpec("probe_workers:Probe", {"die_rank": 0})
    with pytest.raises(WorkerError, match=r"^the process of rank 0 of 2 died in constructing .*SIGKILL"):
        start(spec=spec)


def test_gpus_are_assigned_by_their_visible_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8a,6")
    assert processes.visible_gpus(2) == ["4", "GPU-8a"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert processes.visible_gpus(3) == ["0", "1", "2"]
    third = WorkerSpec("m:C", {}, replica=2, replicas=3)
    assert processes.gpus_of(third, 1) == ["2"]
    assert processes.gpus_of(WorkerSpec("m:C", {}, gpus=2), 1) == ["0,1"]
    with pytest.raises(ConfigError, match=r"num_workers=4 .* 3 GPU"):
        processes.gpus_of(WorkerSpec("m:C", {}, replica=1, replicas=2, gpus=2), 1)
    with pytest.raises(ConfigError, match="set at most 3"):
        processes.visible_gpus(4)


def test_more_workers_than_cores():
    workers = machine.cpu_count() + 1
    group = start(NamedSharding(list(range(workers)), ["data_parallel"]))
    assert [who["rank"] for who in ask(group, "who")] == list(range(workers))
    assert group.shutdown("shutdown") is True


def test_shutdown_twice(fresh):
    group = fresh()
    pids = [answer["pid"] for answer in ask(group, "who")]
    before = threads_of_peers()
    assert group.shutdown("shutdown") is True
    assert running(pids) == []
    assert len(threads_of_peers()) == len(before) - 2
    assert group.shutdown("shutdown") is True


def test_child_processes_end_with_their_worker():
    group = start(NamedSharding([0], ["data_parallel"]), WorkerSpec("probe_workers:Process", {}))
    (child,) = ask(group, "start_a_process")  # by multiprocessing, which forbids that to daemons
    assert running([child]) == [child]
    assert group.shutdown()
    assert left_after_a_while([child]) == []


DRIVER = """
import os, signal, sys, time
sys.path.append({folder!r})
from rlframework.config.sections import WorkerGroupConfig
from rlframework.workers import processes
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.workers.processes import ProcessWorkerGroup
from rlframework.interfaces.worker_group import WorkerSpec

processes.PRELOADED = ("rlframework.workers.fork_server",)  # these workers need no more

{guard}
    group = ProcessWorkerGroup(
        WorkerSpec("probe_workers:Probe", {{}}),
        WorkerGroupConfig(name="processes", num_workers=2),
        sharding=NamedSharding([0, 1], ["data_parallel"]),
        device="cpu",
    )
    answers = group.get_all_worker_results(group.run_all_workers_single_data("who"))
    print(*[who["pid"] for who in answers], flush=True)
    {then}
"""
BUSY = 'group.get_all_worker_results(group.run_all_workers_single_data("sleep", seconds=600))'


def run_driver(path, then, guard='if __name__ == "__main__":'):
    path = path / "driver.py"
    path.write_text(DRIVER.format(folder=os.path.dirname(__file__), guard=guard, then=then))
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(driver, pids):
    """Return the driver's output; its workers and their fork server must exit long before their work is done."""
    try:
        _, errors = driver.communicate(timeout=120)  # returns when nobody holds the driver's pipes any more
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.communicate()
        raise
    assert left_after_a_while(pids) == []
    return errors


STUCK = 'group.get_all_worker_results(group.run_all_workers_single_data("hold_the_interpreter", seconds=600))'


@pytest.mark.parametrize("then", [STUCK, BUSY, "time.sleep(600)"], ids=["stuck", "busy", "idle"])
def test_no_worker_survives_a_driver_that_is_killed(tmp_path, then):
    driver = run_driver(tmp_path, then)
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert running(pids) == pids
    time.sleep(0.2)
    driver.kill()
    end(driver, pids)
    assert driver.returncode == -signal.SIGKILL


def test_ctrl_c_ends_the_workers(tmp_path):
    driver = run_driver(tmp_path, BUSY)
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    time.sleep(0.2)
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to all processes of the foreground
    errors = end(driver, pids)
    assert errors.count("Traceback") == 1
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert driver.returncode == -signal.SIGINT


def test_a_sigterm_for_all_processes_of_a_group_is_left_to_the_driver(tmp_path):
    """As `timeout` and job schedulers send it; the driver may still need its workers, to save a checkpoint."""
    then = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    os.killpg(0, signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        '    print(len(group.get_all_worker_results(group.run_all_workers_single_data("who"))), group.shutdown())'
    )
    driver = run_driver(tmp_path, then)
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    said = driver.stdout.readline()
    assert (end(driver, pids), said, driver.returncode) == ("", "2 True\n", 0)


def test_a_driver_that_forgets_to_shut_down_ends(tmp_path):
    driver = run_driver(tmp_path, "sys.exit(5)")
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert end(driver, pids) == ""
    assert driver.returncode == 5


def test_a_process_forked_from_the_driver_ends_no_worker(tmp_path):
    then = (
        "child = os.fork()\n"
        "    if child == 0: sys.exit(0)\n"
        "    os.waitpid(child, 0)\n"
        '    print(len(group.get_all_worker_results(group.run_all_workers_single_data("who"))), flush=True)\n'
        "    group.shutdown()"
    )
    driver = run_driver(tmp_path, then)
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    said = driver.stdout.readline()
    end(driver, pids)
    assert said == "2\n"
    assert driver.returncode == 0


def test_a_program_without_an_entry_guard_gets_a_hint(tmp_path):
    driver = run_driver(tmp_path, BUSY, guard="if True:")
    errors = end(driver, [])
    assert "died in starting its process" in errors
    assert "a program that starts workers must do so under `if __name__" in errors
    assert driver.returncode == 1


def test_a_temporary_directory_too_deep_for_sockets_gets_a_hint(monkeypatch, tmp_path):
    (deep := tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    errors = end(run_driver(tmp_path, BUSY), [])
    assert f"AF_UNIX path too long): set TMPDIR, {str(deep)!r}, to a shorter path" in errors
