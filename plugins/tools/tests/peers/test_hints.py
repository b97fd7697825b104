"""Hints for unknown keys: the nearest right key, and the vocabulary of other libraries."""

from __future__ import annotations

import re

import pytest
from probe_hints import MINIMAL, error_of
from pydantic import Field

from rlframework.base.errors import ConfigError, PluginError
from rlframework.config.algorithms import GRPOConfig, PPOConfig, SFTConfig
from rlframework.config.base import Section
from rlframework.config.environments import DatasetConfig
from rlframework.config.further_policies import as_of_policy
from rlframework.config.hints import key_paths, models_in, nearest_key
from rlframework.config.models import run_model
from rlframework.config.sections import RunConfig
from rlframework.plugins.configure import load_config
from rlframework_preferences.config import DPOConfig
from rlframework_ray.plugin import RayGroupConfig
from rlframework_tools.peers.frameworks import Framework, frameworks, vocabulary, word_of

PARTS = (("environment", DatasetConfig), ("worker_group", RayGroupConfig))
KEYS = {
    ".".join(path)
    for algorithm in (GRPOConfig, SFTConfig, PPOConfig)
    for path in key_paths(run_model((*PARTS, ("algorithm", algorithm)), ()))
}


KNOWN = vocabulary()


def test_hints_name_keys_of_the_schema_and_no_peer_word_hides_one() -> None:
    assert {key for key in KNOWN.keys.values() if key} <= KEYS
    assert set(re.findall(r"`([a-z_.]+)`", " ".join(KNOWN.hints.values()))) <= KEYS
    pairs = {".".join(path) for path in key_paths(run_model((*PARTS, ("algorithm", DPOConfig)), ()))}
    assert set(re.findall(r"`([a-z_.]+)`", " ".join(KNOWN.of_pairs.values()))) - {"algorithm.gamma"} <= pairs
    assert not {word for word in KNOWN.keys if word in KEYS}
    assert set(KNOWN.values) <= KEYS


@pytest.mark.parametrize("framework", frameworks().values(), ids=frameworks())
def test_each_key_of_a_page_has_a_hint_that_names_our_key(framework: Framework) -> None:
    """The pages are generated from these rows. A key of `critic` is named as that of `policy`, from which it follows.

    What a row says of a word is of one of its keys.
    """
    for name, table in framework.tables.items():
        of_pairs = KNOWN.of_pairs if name in framework.tables_of_pairs else {}
        for row in table:
            for word, ours in row.words():
                hint = of_pairs.get(word) or KNOWN.hints.get(word, "")
                assert (as_of_policy(ours) if name == "critic" else ours) in hint, word
                assert hint.endswith("."), word
            assert {*row.hints, *row.values} <= {word_of(key) for key in (*row.keys, *row.also)}


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("learning_rate=1e-6", "policy.optimizer.lr"),
        ("policy.per_device_train_batch_size=4", "policy.train_micro_batch_size"),
        ("actor_rollout_ref.rollout.n=8", "algorithm.samples_per_prompt"),
        ("algorithm.num_generations=8", "algorithm.samples_per_prompt"),
        ("algorithm.beta=0.1", "algorithm.loss.kl_coef"),
        ("max_prompt_length=512", "generation.max_new_tokens"),
        ("policy.optimizer.max_grad_norm=1", "policy.max_grad_norm"),
        *(
            (f"{above}{word}", ours)
            for above in ("", "algorithm.")
            for word, ours in (
                ("epsilon=0.2", "algorithm.loss.ratio_clip_min"),
                ("reward_weights=[1, 2]", "environment.reward"),
                ("loss_type=grpo", "algorithm.loss.level"),
                ("scale_rewards=group", "algorithm.normalize_std"),
            )
        ),
    ],
)
def test_the_error_names_our_key(written: str, ours: str) -> None:
    message = error_of(written)
    assert "unknown key" in message
    assert f"`{ours}`" in message
    assert "Did you mean" not in message or ours == "policy.max_grad_norm"


@pytest.mark.slow
def test_the_message_in_full() -> None:
    assert error_of("algorithm.num_iterations=8") == (
        "`algorithm.num_iterations`: unknown key (given 8 in override `algorithm.num_iterations=8`). "
        "In rlframework this is `algorithm.epochs_per_batch`."
    )
    assert error_of("algorithm.preset=nemo_rl", "grpo={num_prompts_per_step: 4, max_num_steps: 9}") == (
        "`grpo`: unknown key (in override `grpo={num_prompts_per_step: 4, max_num_steps: 9}`). Its keys in "
        "rlframework:\n    `num_prompts_per_step`: `algorithm.prompts_per_step`.\n    `max_num_steps`: "
        "`algorithm.num_steps`."
    )


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("save_steps=100", "`checkpoints.every`. TRL counts optimizer steps: for GRPO, divide by those of a step here"),
        ("ppo_mini_batch_size=4", "`policy.train_global_batch_size`. Here it counts rows: verl counts prompts"),
        ("train_batch_size=8", "`algorithm.prompts_per_step`. .* OpenRLHF's, .* is `policy.train_global_batch_size`"),
        ("advantage_estimator=group_norm", "`algorithm.name`. Another framework's group_norm is `grpo`"),
        ("algorithm.adv_estimator=remax", "`algorithm.name`. Another framework's remax has no counterpart"),
        ("kl_loss_type=low_var_kl", "`algorithm.loss.kl_estimator`. Another framework's low_var_kl is k3"),
        ("save_freq=-1", "`checkpoints.every`. Another framework's -1 is 0 here"),
        ("vllm_mode=colocate", "`generation.workers`. .* `generation.workers.group` processes; .* TRL's server"),
        (
            "scale_rewards=false",
            "`algorithm.normalize_std`: TRL's group and True are true, .* none and False are false",
        ),
    ],
)
def test_what_differs_in_the_values_is_told(written: str, told: str) -> None:
    assert re.search(f"In rlframework this is {told}", error_of(written))


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("generation.val_kwargs={top_p: 0.9}", "Validation has the run's top_k and top_p"),
        ("algorithm.validation.n=4", "In rlframework this is `algorithm.validation.attempts`."),
        ("zero_stage=3", "it is policy.deepspeed.zero_optimization.stage"),
        ("actor_rollout_ref={ref: {fsdp_config: {param_offload: true}}}", "`ref.fsdp_config`: The reference's weights"),
        ("actor.clip_ratio=0.2", "`algorithm.loss.ratio_clip_min`. It is `algorithm.loss.ratio_clip_max` too"),
        (
            "algorithm.adv_estimator=grpo",
            "grpo has the same name here; verl's formulas are those with algorithm.preset=verl",
        ),
        ("reward_model.enable=false", "False: remove the section"),
        ("reward_model.overlong_buffer={enable: true}", "`enable`: `algorithm.overlong.buffer` above 0 enables it"),
        ("actor_rollout_ref={model: {external_lib: null}}", "`model.external_lib`: `plugins`. A list"),
        ("policy.generation={temperature: 0.7, top_k: null}", "`temperature`: `generation.temperature`"),
        ("algorithm.name=gae", "is `ppo`"),
        ("policy.scheduler.name=LinearLR", "is a warm-up: constant, with its total_iters as policy.scheduler.warmup"),
        ("policy.optimizer.kwargs={betas: [0.9, 0.99], eps: 1e-8}", "`eps`: `policy.optimizer.eps`"),
        ("policy.dtensor_cfg={enabled: true}", "`enabled`: `policy.backend`. Another framework's true is dtensor"),
        ("grpo={async_grpo: {enabled: false}}", "`algorithm.async`. Another framework's false needs no key"),
        ("logger={wandb: {name: x}}", "`wandb.name`: `observers.wandb.run_name`"),
        ("observers=[console, wandb]", "write `observers: {console: true, wandb: {}}`"),
        ("total_training_steps=null", "`algorithm.num_steps`. Another framework's null is algorithm.num_epochs here"),
        ("policy.batching.mode=true", "is dynamic, or packed"),
        ("checkpoints.keep_best=true", "Another framework's true is a number of checkpoints to keep beside the last"),
        ("algorithm.normalize_std=group", "Another framework's group is true."),
        ("actor={optim: {lr: 1e-6, foo: 1}}", "`optim.lr`: `policy.optimizer.lr`.\n    1 more key has"),
        ("policy.dtensor_cfg={lora_cfg: {enabled: false}}", "false is no adapters: remove lora_cfg."),
        ("checkpointing={foo: 1, bar: 2}", "`checkpoints`.\n    2 more keys have no counterpart that is known: foo, b"),
        ("policy.generation={stop_token_ids: null}", "`generation.stop_token_ids`. Another framework's null needs no"),
        ("observers.wandb=true", "For its defaults, write `wandb: {}`."),
        ("generation.workers=2", "For example, write `workers: {num_workers: 2}`."),
        ("algorithm=grpo", "For example, write `algorithm: {name: grpo}`."),
    ],
)
def test_what_to_write_instead_is_told(written: str, hint: str) -> None:
    message = error_of(written)
    assert hint in message
    assert "Did you mean" not in message


def test_a_pasted_tree_has_a_line_for_each_key_that_has_a_hint() -> None:
    many = ", ".join(f"s{index}: {{n: 1}}" for index in range(45))
    message = error_of(
        "algorithm.preset=verl",
        f"actor_rollout_ref={{rollout: {{val_kwargs: {{n: 4}}, max_prompt_length: 9}}, {many}}}",
    )
    lines = message.splitlines()
    assert lines[1] == "    `rollout.val_kwargs.n`: `algorithm.validation.attempts`."
    assert lines[2].startswith("    `rollout.max_prompt_length`: Prompts are not truncated")
    assert lines[3] == "    `s0.n`: `algorithm.samples_per_prompt`."
    assert (len(lines), lines[-1]) == (42, "    and 7 more")


def test_keys_of_a_pasted_tree_without_a_hint_are_named() -> None:
    message = error_of("trainer={nnodes: 1, ray: {wait: 3}, esi: 2, custom_reward_function: {path: a, name: b}}")
    assert message.splitlines()[-1] == "    2 more keys have no counterpart that is known: ray.wait, esi."
    names = ", ".join(f"k{index}: 1" for index in range(14))
    message = error_of(f"trainer={{nnodes: 1, {names}}}")
    assert message.splitlines()[-1].endswith(
        "14 more keys have no counterpart that is known: " + ", ".join(f"k{index}" for index in range(12)) + ", ..."
    )


def test_a_problem_is_reported_where_it_was_written() -> None:
    message = error_of("critic={bar: 2}", "policy.foo=1", "policy.max_grad_norm=x", "algorithm.name=ppo")
    assert re.findall(r"^- `([\w.]+)`", message, re.MULTILINE) == ["policy.max_grad_norm", "policy.foo", "critic.bar"]


def test_a_word_that_other_algorithms_have_is_told_once() -> None:
    assert error_of("algorithm.beta=0.1") == (
        "`algorithm.beta`: unknown key (given 0.1 in override `algorithm.beta=0.1`). If it is a key of another "
        "framework: in rlframework this is `algorithm.loss.kl_coef`. Otherwise: it is a key of `dpo`, `ipo`, "
        "`simpo`, `kto`, but algorithm.name is `grpo`. Remove it; the override `~algorithm.beta` does that, too."
    )


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("beta=0.1", "Did you mean `algorithm.beta`?"),
        ("algorithm.loss_type=ipo", "ipo is `algorithm.name` ipo"),
        ("algorithm.loss_type=[sigmoid, sft]", "[sigmoid, sft] is `algorithm.sft_weight` with it. Others have no"),
        ("algorithm.loss_weights=[1.0, 0.5]", "these are `algorithm.weight` and `algorithm.sft_weight`, in the order"),
        ("gradient_accumulation_steps=2", "it is twice per_device_train_batch_size x gradient_accumulation_steps x"),
    ],
)
def test_words_have_the_meaning_that_they_have_for_pairs(written: str, hint: str) -> None:
    assert hint in error_of("~environment.name", "environment.name=preferences", "algorithm.name=dpo", written)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("reward_model", "beta=0.1"),
        ("reward_model", "loss_weights=[1.0, 0.5]"),
        ("sft", "num_generations=8"),
        ("sft", "trainer={epsilon: 0.2}"),
    ],
)
def test_an_algorithm_without_the_key_has_no_counterpart(name: str, written: str) -> None:
    message = error_of(f"algorithm.name={name}", written)
    assert f"It has no counterpart with `algorithm.name` {name}: remove the key." in message
    assert "In rlframework this is" not in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.format.wieght=2",
            "`environment.reward.format.wieght`: unknown key .* mean `environment.reward.format.weight`",
        ),
        (
            "reward=[a:correct, b:brief]",
            r'{correct: {function: "a:correct", weight: 1.0}, brief: {function: "b:brief", w',
        ),
        ("reward=[my.rewards.one, b]", r'{one: {function: "my.rewards:one", weight: 1.0}, b: {function: "b", w'),
        ("reward=[a:one, b:one]", r"{one_0: {function: .*, one_1: {"),
    ],
)
def test_several_rewards_are_told_how_to_be_written(override: str, message: str) -> None:
    reward = {name: {"function": f"json:{name}"} for name in ("dumps", "format")}
    environment = {"name": "dataset", "path": "rows.jsonl", "reward": reward}
    with pytest.raises(ConfigError, match=message) as error:
        load_config({**MINIMAL, "environment": environment}, [f"environment.{override}"])
    assert str(error.value).startswith("`environment.reward")  # a single problem


def test_the_way_to_switch_validation_off_is_told() -> None:
    off = ["algorithm.validation.at_start=false", "algorithm.validation.at_end=false"]
    assert all(each in error_of("algorithm.validation=null") for each in off)
    validation = load_config(MINIMAL, off).algorithm.validation
    assert (validation.every, validation.at_start, validation.at_end) == (0, False, False)


@pytest.mark.parametrize("name", [{}, {"name": "gae"}], ids=["no-name", "unknown-name"])
def test_keys_of_a_section_get_their_hints_before_its_name_is_known(name: dict[str, str]) -> None:
    """Of another framework, not those that any algorithm has."""
    algorithm = {**name, "use_kl_in_reward": True, "lam": 0.95, "gamma": 1.0, "num_steps": 3}
    with pytest.raises((ConfigError, PluginError)) as error:
        load_config({**MINIMAL, "algorithm": algorithm})
    message = str(error.value)
    assert "\n    `use_kl_in_reward`: `algorithm.reward_kl`" in message
    assert message.endswith("`lam`: `algorithm.gae_lambda`. It is a key of `algorithm.name` ppo.")


def test_a_configuration_without_unknown_keys_does_not_read_the_words() -> None:
    vocabulary.cache_clear()
    load_config(MINIMAL)
    assert vocabulary.cache_info().currsize == 0


def test_a_misspelled_sibling_is_preferred_to_a_peer_word() -> None:
    assert "Did you mean `policy.optimizer.betas`?" in error_of("policy.optimizer.beta=0.9")


class Inner(Section):
    depth: int = 1


class Outer(Section):
    plain: int = 1
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: list[Inner] = Field(default_factory=list)
    named: dict[str, Inner] | str = ""


def test_all_keys_are_found_through_optional_and_listed_models() -> None:
    keys = {".".join(path) for path in key_paths(Outer)}
    assert keys == {
        "plain",
        "inner",
        "inner.depth",
        "maybe",
        "maybe.depth",
        "many",
        "many.depth",
        "named",
        "named.NAME.depth",
    }
    assert models_in(Inner | None) == [Inner]
    assert models_in(dict[str, int]) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("policy.lr", "policy.optimizer.lr"),
        ("policy.optimizer.lrr", "policy.optimizer.lr"),
        ("polcy", "policy"),
        ("modle_name", "policy.model_name"),
        ("policy.optimizer.max_grad_norm", "policy.max_grad_norm"),
        ("tensor", "policy.parallelism.tensor"),
        ("num_workers", "worker_group.num_workers"),
        ("generation.max_tokens", "generation.max_new_tokens"),
        ("generation.Temperature", "generation.temperature"),
        ("output-dir", "output_dir"),
    ],
)
def test_the_key_that_was_meant(written: str, meant: str) -> None:
    assert nearest_key(tuple(written.split(".")), RunConfig) == tuple(meant.split("."))


@pytest.mark.parametrize("written", ["zzz", "policy.qqqqqq", "x", "generation.mode"])
def test_nothing_is_suggested_when_nothing_is_near(written: str) -> None:
    assert nearest_key(tuple(written.split(".")), RunConfig) is None
