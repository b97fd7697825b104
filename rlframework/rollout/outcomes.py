"""Checks of what an environment returned. Errors name the environment, the sample and the turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rlframework.base.errors import UserError
from rlframework.interfaces.environment import LARGEST_REWARD, Sample, StepOutcome
from rlframework.interfaces.messages import ContentPart, ImagePart, Message, Picture, ToolCall, ToolSpec

if TYPE_CHECKING:
    from rlframework.datasets.pictures import PictureReader

_KEYS = frozenset(Message.__annotations__)
_RESET_ROLES = ("system", "user", "assistant", "tool")
_OBSERVED_ROLES = ("system", "user", "tool")


def require_numbers(outcomes: Sequence[StepOutcome], samples: Sequence[Sample], environment: str) -> None:
    """Raise `UserError` for another number of outcomes, and for a reward or metric that is not a usable number."""
    if len(outcomes) != len(samples):
        raise UserError(f"environment {environment!r} returned {len(outcomes)} outcomes for {len(samples)} samples")
    for sample, outcome in zip(samples, outcomes, strict=True):
        _require_numbers(outcome, environment, f"for sample {sample.id!r}")


def _require_numbers(outcome: StepOutcome, environment: str, where: str) -> None:
    for name, value in {"reward": outcome.reward, **outcome.metrics}.items():
        if isinstance(value, str) or not _is_usable(value):
            raise UserError(
                f"environment {environment!r} returned {name}={value!r:.80} {where}; it must be a finite number of at "
                f"most {LARGEST_REWARD:g} in size"
            )


def _is_usable(value: Any) -> bool:
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor with several numbers
        return abs(float(value)) <= LARGEST_REWARD
    return False


def outcome_metrics(outcomes: Iterable[StepOutcome]) -> dict[str, float]:
    """Combine the metrics of `outcomes`, except `accuracy`, by metric name.

    `reward_failures` is summed; every other metric becomes `reward/NAME`, the mean over the outcomes that have it.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            found[name].append(float(value))
    found.pop("accuracy", None)
    failures = {"reward_failures": sum(found.pop("reward_failures"))} if "reward_failures" in found else {}
    return failures | {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}


class EpisodeChecks:
    """Checks what the episode of `sample` returned. Each method raises `UserError` for what is wrong.

    `reader`: reads the images of messages; None if they must have none.
    """

    def __init__(self, environment: str, sample: Sample, reader: PictureReader | None = None) -> None:
        self._environment, self._sample, self._reader = environment, sample, reader

    def where(self, turn: int) -> str:
        """Return the sample and the turn, counted from 1, for messages; turn 0 is `reset`."""
        return f"for sample {self._sample.id!r} in {f'turn {turn}' if turn else 'reset'}"

    def start(self, messages: Any) -> tuple[Message, ...]:
        """Return what `reset` has returned: a conversation that the model continues."""
        checked = self._messages(messages, 0, _RESET_ROLES, ())
        if not checked or checked[-1]["role"] == "assistant":
            last = "no message" if not checked else "an assistant message at the end"
            self._reject(0, f"{last}; it must be a conversation that the model's turn follows")
        return checked

    def tools(self, tools: Any) -> tuple[ToolSpec, ...]:
        """Return the tools of an episode, which must have distinct names."""
        names = set[str]()
        for tool in tools if isinstance(tools, Sequence) and not isinstance(tools, str) else (tools,):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not (isinstance(name, str) and name and tool.get("type") == "function") or name in names:
                self._reject(
                    0,
                    f"the tool {tool!r:.200}; a tool is {{'type': 'function', 'function': {{'name': ..., "
                    "'description': ..., 'parameters': ...}}, with a name of its own",
                )
            names.add(name)
        return tuple(tools)

    def outcome(self, outcome: Any, turn: int, calls: Sequence[ToolCall]) -> StepOutcome:
        """Return what `step` has returned for the model's turn `turn`, counted from 1, with the tool calls `calls`."""
        if not isinstance(outcome, StepOutcome):
            self._reject(turn, f"{outcome!r:.80} of type {type(outcome).__name__}; step must return a StepOutcome")
        if outcome.done not in (True, False):
            self._reject(turn, f"done={outcome.done!r:.80}; it must be True or False")
        if not isinstance(outcome.metrics, Mapping):
            self._reject(turn, f"metrics={outcome.metrics!r:.80}; it must be a mapping from names to numbers")
        _require_numbers(outcome, self._environment, self.where(turn))
        observations = self._messages(outcome.observations, turn, _OBSERVED_ROLES, calls)
        if not (observations or outcome.done):
            self._reject(turn, "no observations, although the episode is not done; return what the next turn answers")
        return StepOutcome(float(outcome.reward), bool(outcome.done), observations, outcome.metrics)

    def _messages(
        self, messages: Any, turn: int, roles: Sequence[str], calls: Sequence[ToolCall]
    ) -> tuple[Message, ...]:
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            self._reject(turn, f"{messages!r:.80} of type {type(messages).__name__}; it must be a sequence of messages")
        unanswered = {call["id"] for call in calls}
        checked = [self._message(message, turn, roles) for message in messages]
        for message in checked:
            if message["role"] == "assistant":
                unanswered = {call["id"] for call in message.get("tool_calls", ())}
            elif message["role"] == "tool":
                answered = message.get("tool_call_id")
                if answered not in unanswered:
                    open_ids = ", ".join(map(repr, sorted(unanswered))) or "none"
                    self._reject(
                        turn,
                        f"a tool message with tool_call_id={answered!r}; calls without an answer: {open_ids}. A tool "
                        "that the model calls in plain text, not in `tool_calls`, answers with role 'user'",
                    )
                unanswered.remove(answered)
        return tuple(checked)

    def _message(self, message: Any, turn: int, roles: Sequence[str]) -> Message:
        if not isinstance(message, Mapping):
            self._reject(turn, f"{message!r:.80} of type {type(message).__name__} as a message; it must be a mapping")
        if message.get("role") not in roles:
            self._reject(turn, f"a message with role={message.get('role')!r:.80}; it must be one of {', '.join(roles)}")
        if unknown := sorted(map(str, message.keys() - _KEYS)):
            self._reject(turn, f"a message with {', '.join(unknown)}; the keys are {', '.join(sorted(_KEYS))}")
        content = message.get("content")
        if isinstance(content, str):
            return cast("Message", message)
        parts = content if isinstance(content, Sequence) else (content,)
        return cast("Message", {**message, "content": [read for part in parts for read in self._parts(part, turn)]})

    def _parts(self, part: Any, turn: int) -> Sequence[ContentPart]:
        """Return a part of a content; its images as they are now, since files and arrays may change later."""
        from rlframework.datasets.pictures import KINDS, decoded

        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return [cast("ContentPart", part)]
        if kind not in KINDS or self._reader is None:
            hint = "; images need environment.images" if kind in KINDS else ""
            self._reject(
                turn,
                f"a message with the content {part!r:.80} of type {type(part).__name__}; it must be a text, or parts "
                f"{{'type': 'text', 'text': ...}}{hint}",
            )
        if isinstance(part.get("image"), Picture):
            return [cast("ContentPart", part)]
        where = f"environment {self._environment!r}, {self.where(turn)}"
        read = self._reader.parts(part, where)
        found = [each["image"] for each in read if each["type"] == "image"]
        if len(found) < len(read):
            self._reject(turn, f"a part of the type {kind} without an image")
        return [ImagePart(type="image", image=Picture(decoded(picture), picture.where)) for picture in found]

    def _reject(self, turn: int, what: str) -> NoReturn:
        raise UserError(f"environment {self._environment!r} returned {self.where(turn)} {what}")
