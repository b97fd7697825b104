"""The tool and the agent of the recipes `tools` and `agent`, on the questions of GSM8K."""

from openai import AsyncOpenAI

from rlframework.interfaces.environment import AgentSession, Sample


class Calculator:
    """Its public methods are tools."""

    def add(self, a: float, b: float) -> float:
        """Return a + b."""
        return a + b

    def subtract(self, a: float, b: float) -> float:
        """Return a - b."""
        return a - b

    def multiply(self, a: float, b: float) -> float:
        """Return a * b."""
        return a * b

    def divide(self, a: float, b: float) -> float:
        """Return a / b."""
        return a / b


async def solve(sample: Sample, session: AgentSession) -> None:
    """Answer, and check the answer in a second turn, whose text `environment.check` scores."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = list(sample.messages)
        first = await client.chat.completions.create(model=session.model, messages=messages)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Check each step, and write the result in \\boxed{}."},
        ]
        await client.chat.completions.create(model=session.model, messages=messages)
