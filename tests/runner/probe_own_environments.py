"""Reward functions and environments that tests give by import path."""

from __future__ import annotations

from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Sample, StepOutcome


def digits(completion):
    share = sum(letter.isdigit() for letter in completion) / max(1, len(completion))
    return {"reward": share, "length": len(completion)}


def fails_for_some(completion, answer):
    if int(answer) % 4 == 0:
        raise ValueError("a multiple of four")
    return float(len(completion))


class CountingConfig(EnvironmentConfig):
    upto: int = 20


class Counting(Environment):
    config_model = CountingConfig

    def __init__(self, config, *, seed):
        self.config = config

    def samples(self, split):
        numbers = range(self.config.upto) if split == "train" else range(self.config.upto, self.config.upto + 5)
        return [Sample(str(n), ({"role": "user", "content": f"{n}?"},), "", completion=str(n)) for n in numbers]

    def step(self, samples, conversations):
        return [StepOutcome(digits(talk[-1]["content"])["reward"]) for talk in conversations]


class Unmade(Counting):
    config_model = None

    def __init__(self, config, *, seed):
        self.upto = config.upto


class Plain(Counting):
    config_model = None

    def __init__(self, config, *, seed):
        self.config = CountingConfig(name="x")


class Tiring(Counting):
    # its rewards depend on what it judged before, so a run that goes on needs its state

    def __init__(self, config, *, seed):
        self.config, self.judged = config, 0

    def step(self, samples, conversations):
        outcomes = []
        for talk in conversations:
            self.judged += 1
            outcomes.append(StepOutcome(digits(talk[-1]["content"])["reward"] / self.judged))
        return outcomes

    def state_dict(self):
        return {"judged": self.judged}

    def load_state_dict(self, state):
        self.judged = state["judged"]


class Half(Environment):
    def samples(self, split):
        return []


class Mistyped(Counting):
    config_model = dict


class Unscored(Environment):
    def __init__(self, config, *, seed):
        pass

    def samples(self, split):
        return []


not_a_class = 3
