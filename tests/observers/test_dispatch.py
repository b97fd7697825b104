"""Dispatch of events to observers, and isolation of observers that raise."""

import sys
import types

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.environments import AdditionConfig
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import ObserversConfig, RunConfig
from rlframework.observers import dispatch
from rlframework.observers.dispatch import Observers, observer_problems, require_observers
from rlframework.plugins.discovery import Plugin
from rlframework.plugins.hookspec import RunInfo, SampleRecord, hookimpl
from rlframework.plugins.manager import PluginManager, create_manager

NONE = ObserversConfig(console=False, jsonl=False, tensorboard=False, curve=False)


@pytest.fixture
def info(tmp_path):
    config = RunConfig(
        algorithm=GRPOConfig(num_steps=3),
        policy=PolicyConfig(model_name="m"),
        environment=AdditionConfig(),
        output_dir=tmp_path,
        observers=NONE,
    )
    return RunInfo(config, tmp_path)


def manager_of(*objects):
    """The manager of `objects`, each a plugin named after its class, of the distribution NAME 1.0."""
    names = [type(plugin).__name__ for plugin in objects]
    plugins = [Plugin(name, name, "1.0", "", lambda it=it: it) for name, it in zip(names, objects, strict=True)]
    for plugin in plugins:
        plugin.load()
    return PluginManager(plugins, frozenset())


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def rlframework_run_started(self, run):
        self.seen.append(("started", run))

    @hookimpl
    def rlframework_step_finished(self, run, step, metrics, samples):
        self.seen.append(("step", step, dict(metrics), samples))

    @hookimpl
    def rlframework_checkpoint_saved(self, step, path):
        self.seen.append(("saved", step, path))

    @hookimpl
    def rlframework_run_finished(self, metrics):
        self.seen.append(("finished", dict(metrics)))


class Raises:
    calls = 0

    def __init__(self, error):
        self.error = error

    @hookimpl
    def rlframework_step_finished(self, step):
        self.calls += 1
        raise self.error(f"no good at {step}")

    @hookimpl
    def rlframework_run_finished(self, metrics):
        self.calls += 1


def test_every_hook_gets_its_arguments(info, tmp_path):
    recorder = Recorder()
    sample = SampleRecord(prompt="1+1=", completion="2", reward=1.0, step=1, kind="train")
    with Observers(NONE, info, manager_of(recorder)) as observers:
        observers.step_finished(1, {"train/loss": 2}, [sample])
        observers.checkpoint_saved(1, tmp_path / "model")
        observers.run_finished({"train/loss": 1.5})
    assert recorder.seen == [
        ("started", info),
        ("step", 1, {"train/loss": 2.0}, (sample,)),
        ("saved", 1, tmp_path / "model"),
        ("finished", {"train/loss": 1.5}),
    ]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_observer_that_raises_is_reported_once_and_disabled(info, caplog, error):
    raises, recorder = Raises(error), Recorder()
    with Observers(NONE, info, manager_of(recorder, raises)) as observers:
        for step in (1, 2, 3):
            observers.step_finished(step, {})
        observers.run_finished({})
    assert raises.calls == 1
    assert [entry[0] for entry in recorder.seen] == ["started", "step", "step", "step", "finished"]
    reported = f"observer 'Raises' failed and is disabled; the run continues: {error.__name__}: no good at 1"
    assert caplog.messages == [reported]


def test_a_keyboard_interrupt_in_an_observer_ends_the_run(info):
    observers = Observers(NONE, info, manager_of(Raises(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        observers.step_finished(1, {})


def test_an_observer_can_neither_change_metrics_nor_wrap_another(info, caplog):
    class Changes:
        @hookimpl
        def rlframework_step_finished(self, metrics):
            metrics["train/loss"] = 0.0

    class Wraps:
        @hookimpl(wrapper=True)
        def rlframework_step_finished(self):
            yield

    recorder, given = Recorder(), {"train/loss": 3.0}
    Observers(NONE, info, manager_of(Wraps(), recorder, Changes())).step_finished(1, given)
    assert [entry[2] for entry in recorder.seen] == [given] == [{"train/loss": 3.0}]
    assert "TypeError" in caplog.text
    assert "wrapped" in caplog.text


def test_core_observers_are_closed_after_a_failed_run(info, monkeypatch):
    events = []

    class Core(Recorder):
        seen = events

        def __init__(self):
            """It writes down the events of all."""

        def close(self, state):
            events.append((state,))

    module = types.ModuleType("core_observer_for_this_test")
    module.Core = Core
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "CORE_OBSERVERS", {"console": f"{module.__name__}:Core"})
    with pytest.raises(ValueError, match="training broke"), Observers(ObserversConfig(), info) as observers:
        raise ValueError("training broke")
    observers.close()
    assert [event for event, *_ in events] == ["started", "failed"]


def test_a_core_observer_that_cannot_be_constructed_is_reported(info, caplog):
    config = NONE.model_copy(update={"jsonl": True, "console": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rlframework.observers.console", None)
        with Observers(config, info) as observers:
            observers.step_finished(1, {})
    assert "'console'" in caplog.text
    assert (info.output_dir / "metrics.jsonl").read_text().count("\n") == 1


def test_every_switch_of_the_section_has_an_observer_with_hooks(info):
    names = [name for name in ObserversConfig.model_fields if name not in ("samples", "peak_tflops")]
    config = NONE.model_copy(update=dict.fromkeys(names, True))
    core = Observers(config, info, create_manager())._core
    assert {name for name, _ in core.list_name_plugin()} == set(names)
    assert all(core.get_hookcallers(observer) for _, observer in core.list_name_plugin())
    core.check_pending()


class Provides:
    @hookimpl
    def rlframework_observers(self):
        return {"wandb": "nowhere:Observer"}


class AlsoProvides(Provides):
    pass


class Fails:
    @hookimpl
    def rlframework_observers(self):
        return 7


def raise_lookup():
    raise LookupError("oh")


def lazily():
    yield from raise_lookup()


class Asks:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def rlframework_observer_problems(self, config):
        return self.answer()


@pytest.mark.parametrize(
    ("plugins", "keys", "error", "message"),
    [
        ([], {"wandb": {}}, ConfigError, r"^observers.wandb is set, but no plugin has it: pip install -e "),
        ([Fails()], {"mlflow": {}}, ConfigError, r"observers\.mlflow is set, but no plugin has it: "),
        (
            [Provides(), AlsoProvides()],
            {"wandb": {}},
            PluginError,
            r"observers\.wandb: 2 plugins provide this observer: .*Provides 1\.0 and ",
        ),
        ([Asks(lambda: iter(["no disk"]))], {}, ConfigError, r"^no disk$"),
    ],
)
def test_observers_that_cannot_be_used_are_named_before_the_run(plugins, keys, error, message):
    with pytest.raises(error, match=message):
        require_observers(ObserversConfig(**keys), manager_of(*plugins))
    if keys:  # nobody asks for them
        assert observer_problems(ObserversConfig(), manager_of(*plugins)) == []


@pytest.mark.parametrize(
    ("plugin", "failure"),
    [
        (Fails(), "rlframework_observers of Fails 1.0 failed: TypeError: "),
        (Asks(raise_lookup), "rlframework_observer_problems of Asks 1.0 failed: LookupError: oh. "),
        (Asks(lazily), "rlframework_observer_problems of Asks 1.0 failed: LookupError: oh. "),
        (
            Asks(lambda: "no disk"),
            "rlframework_observer_problems of Asks 1.0 failed: TypeError: it returned the text 'no disk'; it must",
        ),
    ],
)
def test_a_hook_that_fails_is_named_once_and_does_not_prevent_the_run(info, caplog, plugin, failure):
    manager = manager_of(plugin, Provides())
    require_observers(NONE, manager)
    Observers(NONE, info, manager)
    [message] = caplog.messages
    assert message.startswith(f"warning: {failure}")


def test_names_of_metrics_are_text_and_bounded(info, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "MOST_METRICS", 3)
    recorder = Recorder()
    observers = Observers(NONE, info, manager_of(recorder))
    observers.step_finished(1, {"train/loss": 1, "reward/\ud800": 2, "a" * 300: 3, "reward/b": 4})
    observers.step_finished(2, {"reward/c": 5, "train/loss": 6})
    observers.run_finished({"train/loss": 7, "reward/c": 8})
    seen = [entry[2] if entry[0] == "step" else entry[1] for entry in recorder.seen]
    assert seen == [
        {"train/loss": 1.0, "reward/\\ud800": 2.0, "a" * 250: 3.0},
        {"train/loss": 6.0},
        {"train/loss": 7.0},
    ]
    (record,) = caplog.records
    assert "more than 3 different metrics; new ones, such as 'reward/b', are left out" in record.getMessage()
