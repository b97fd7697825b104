"""Compare exact tokens with the approach that renders and tokenises the whole conversation each turn.

The same generated episodes, 8 for each of the chat formats of the tests, are recorded in both ways. A model that is
written by hand samples tokens that are not always those which the tokenizer would choose. Counted are rollouts with a
break (a prompt that does not start with the tokens before it), breaks, and changed tokens: sampled tokens that the
tokens to train on, of the next rendering or of the training rows, do not have at their place. Then the CPU time of
`ChatFormat.extend` in a conversation of 20 turns.

    python benchmarks/exact_tokens.py | tee docs/results/exact_tokens.txt
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from chat_formats import NAMES, TOOLS, Turn, result, sampled, tokenizer, written

from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.interfaces.messages import Message
from rlframework.rollout.trajectory import Trajectory

EPISODES, TURNS = 8, 4


def play(name: str, seed: int, exact: bool) -> tuple[int, int, int]:
    """Play one episode; return breaks, sampled tokens, and those of them that changed."""
    rng = random.Random(f"{name} {seed}")
    chat, trajectory = ChatFormat(tokenizer(name)), Trajectory()
    messages: list[Message] = [{"role": "user", "content": f"add {rng.randint(1, 99)}"}]
    prompt, total, lost, breaks = chat.prompt(messages), 0, 0, 0
    everything: list[int] = []
    for number in range(TURNS):
        call = {"a": rng.randint(1, 99)} if number % 2 == 0 else None
        text, end = written(name, Turn("" if call else f"the answer is {rng.randint(1, 99)}", None, call))
        ids = sampled(name, text + end, rng)
        trajectory.add(torch.tensor(prompt), result(ids, rng))
        total += len(ids)
        everything += ids
        reply, history = chat.parse(ids, TOOLS), [*prompt, *ids]
        new: Message = {"role": "user", "content": f"and {rng.randint(1, 99)}?"}
        if call:
            new = {"role": "tool", "content": str(rng.randint(1, 99)), "name": "add"}
            new["tool_call_id"] = reply["tool_calls"][0]["id"]
        extended = chat.extend(history, [*messages, reply], [new]) if exact else None
        messages += [reply, new]
        rendered = chat.prompt(messages)
        if not exact:  # trained on are the tokens of the rendering
            pairs = zip(ids, rendered[len(prompt) : len(history)], strict=False)
            lost += sum(one != other for one, other in pairs)
        prompt = rendered if extended is None else extended
        breaks += prompt[: len(history)] != history
    if exact:  # trained on are the tokens of the rows
        trained = torch.cat([row.token_ids[row.token_mask] for row in trajectory.rows]).tolist()
        lost = abs(len(trained) - total) + sum(one != other for one, other in zip(trained, everything, strict=False))
    return breaks, total, lost


def milliseconds_of_extend(name: str) -> tuple[float, float]:
    """CPU time of the calls of `extend` after 20 turns of an answer each, in all and for the last."""
    model, rng = tokenizer(name), random.Random(0)
    chat = ChatFormat(model)
    messages: list[Message] = [{"role": "user", "content": "one " * 50}]
    prompt, spent = chat.prompt(messages), []
    for _ in range(20):
        text, end = written(name, Turn("two " * 50))
        ids = sampled(name, text + end, rng)
        messages.append(chat.parse(ids))
        new: Any = {"role": "user", "content": "three " * 50}
        history, started = [*prompt, *ids], time.process_time()
        extended = chat.extend(history, messages, [new])
        spent.append(1000 * (time.process_time() - started))
        messages.append(new)
        prompt = chat.prompt(messages) if extended is None else extended
    return sum(spent), spent[-1]


def main() -> None:
    print(f"{EPISODES} episodes of {TURNS} turns per format")
    print(f"{'format':14}{'way':12}{'rollouts with breaks':>22}{'breaks':>8}{'sampled tokens':>16}{'changed':>9}")
    for exact in (False, True):
        way, sums = "exact" if exact else "re-rendered", [0, 0, 0, 0]
        for name in NAMES:
            played = [play(name, seed, exact) for seed in range(EPISODES)]
            row = [sum(breaks > 0 for breaks, _, _ in played), *(sum(column) for column in zip(*played, strict=True))]
            sums = [one + other for one, other in zip(sums, row, strict=True)]
            print(f"{name:14}{way:12}{row[0]:22}{row[1]:8}{row[2]:16}{row[3]:9}")
        print(f"{'all':14}{way:12}{sums[0]:22}{sums[1]:8}{sums[2]:16}{sums[3]:9}  of {len(NAMES) * EPISODES} rollouts")
    print("\nCPU milliseconds of `extend` in a conversation of 20 turns: in all, and of the last")
    for name in NAMES:
        print(f"{name:14}{'{:8.1f}{:8.2f}'.format(*milliseconds_of_extend(name))}")


if __name__ == "__main__":
    main()
