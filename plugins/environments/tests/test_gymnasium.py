"""Gymnasium's FrozenLake and a text game of a module of the user's. The lake's path is by hand from its map."""

import sys

import pytest
from episode_play import play, says, texts

from rlframework.base.errors import ConfigError
from rlframework_environments.config import GymnasiumConfig
from rlframework_environments.gymnasium import GymnasiumEnvironment

LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}, "actions": ("left", "down", "right", "up")}

GAME = """
import gymnasium
from gymnasium.spaces import Text

class Guess(gymnasium.Env):
    observation_space = Text(200, charset="Guess 0123456789 letters right.")
    action_space = Text(5, charset="abc")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join("abc"[i] for i in self.np_random.integers(3, size=2))
        return f"Guess {len(self.word)} letters.", {}

    def step(self, action):
        right = sum(a == b for a, b in zip(action, self.word))
        return f"{right} right", right / 2 - 0.5, action == self.word, False, {}

gymnasium.register("Guess-v0", Guess)
"""


def make(**keys):
    return GymnasiumEnvironment(GymnasiumConfig(train_samples=6, validation_samples=2, **keys), seed=0)


def test_the_lake_is_crossed():
    """SFFF / FHFH / FFFH / HFFG: down, down, right, right, down, right."""
    environment = make(**LAKE)
    sample = environment.samples("train")[0]
    turns = [says(text) for text in ("down", "fly", "Down ", "right", "right", "down", "right", "never")]
    tools, first, outcomes = play(environment, sample, turns)
    assert tools == ()
    assert [m["content"] for m in first] == ["Reply with one action: left, down, right, up.\n\n0"]
    assert texts(outcomes[1]) == ["'fly' is not an action; reply with one of: left, down, right, up"]
    assert [texts(o)[0] for o in outcomes if not o.done and o is not outcomes[1]] == ["4", "8", "9", "10", "14"]
    assert [(o.reward, o.done) for o in outcomes] == [(0.0, False)] * 6 + [(1.0, True)]
    assert outcomes[-1].metrics == {"accuracy": 1.0}


def test_a_hole_or_the_last_step_ends_an_episode():
    environment = make(**LAKE, invalid_action_reward=-0.5, render=True)
    turns = [says(text) for text in ("x", "right", "down", "left")]
    _, first, outcomes = play(environment, environment.samples("train")[0], turns)
    assert first[0]["content"].endswith("\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert [(o.reward, o.done) for o in outcomes] == [(-0.5, False), (0.0, False), (0.0, True)]
    assert outcomes[-1].metrics == {"accuracy": 0.0}
    truncated = make(**LAKE | {"arguments": {"is_slippery": False, "max_episode_steps": 2}})
    outcomes = play(truncated, truncated.samples("train")[0], [says("left"), says("left")])[2]
    assert [(o.reward, o.done) for o in outcomes] == [(0.0, False), (0.0, True)]


def test_attempts_at_a_task_start_alike_and_share_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "guess_game.py").write_text(GAME)
    environment = make(id="guess_game:Guess-v0", solved_reward=0.5)
    sample, other = environment.samples("train")[:2]
    words = [a + b for a in "abc" for b in "abc"]
    turns = [says("xyz"), *(says(word) for word in words)]
    first, second = play(environment, sample, turns)[2], play(environment, sample, turns, seed=1)[2]
    assert first == second
    assert texts(first[0])[0].startswith("'xyz' is not an action")
    assert first[-1].done
    assert first[-1].reward == 0.5
    assert sum(outcome.reward for outcome in first) < 0.5  # the total decides, with those of wrong words
    assert first[-1].metrics == {"accuracy": 0.0}
    solution = turns[len(first) - 1]
    assert play(environment, sample, [solution])[2][-1].metrics == {"accuracy": 1.0}
    starts = {len(play(environment, each, turns)[2]) for each in environment.samples("train")}
    assert len(starts) > 1  # other seeds have other words
    assert sample.id != other.id
    sys.modules.pop("guess_game")


def test_splits_share_no_seed_and_equal_seeds_give_equal_tasks():
    environment = make(**LAKE)
    seeds = {split: [s.metadata["seed"] for s in environment.samples(split)] for split in ("train", "validation")}
    assert len(set(seeds["train"] + seeds["validation"])) == 8
    more = GymnasiumEnvironment(GymnasiumConfig(train_samples=9, validation_samples=2, **LAKE), seed=0)
    assert [s.metadata["seed"] for s in more.samples("validation")] == seeds["validation"]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"id": "no_such_module:X-v0"}, "no_such_module"),
        ({"id": "CartPole-v1"}, "neither discrete nor text"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b")}, "2 names for the 4 actions"),
        ({"id": "FrozenLake-v1", "arguments": {"size": 3}}, "raised TypeError"),
    ],
)
def test_an_environment_that_cannot_be_played(keys, problem):
    with pytest.raises(ConfigError, match=problem):
        make(**keys)
