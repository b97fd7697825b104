"""Plays episodes with scripted turns, as the rollout does: reset, steps until done, close."""

import asyncio
import json


def calls(*named, start=0):
    """An assistant message that calls tools: (name, arguments) each, arguments as an object or as text."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
            }
            for number, (name, given) in enumerate(named, start)
        ],
    }


def says(text):
    return {"role": "assistant", "content": text}


def play(environment, sample, turns, seed=0):
    """Play an episode; return its tools, its first messages, and the outcome of each turn."""

    async def run():
        episode = environment.episode(sample, seed)
        try:
            first = await episode.reset()
            outcomes = []
            for turn in turns:
                outcomes.append(await episode.step(turn))
                if outcomes[-1].done:
                    break
            return episode.tools, first, outcomes
        finally:
            await episode.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def texts(outcome):
    return [message["content"] for message in outcome.observations]
