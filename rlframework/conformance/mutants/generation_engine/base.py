"""Helpers that break a generation engine by changing its input or its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def broken_settings(change: Callable[[Any], dict[str, Any]]) -> Callable[[type], type]:
    """Break the settings: the configuration is updated with `change(config)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
                super().__init__(config.model_copy(update=change(config)), tokenizer, **place)

        return Broken

    return break_it


def broken_generate(change: Callable[..., Any]) -> Callable[[type], type]:
    """Break `generate`: it returns `change(self, sound, data, greedy)`; `self` has `settings` and `module`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
                super().__init__(config, tokenizer, **place)
                self.settings, self.pad_id = config, tokenizer.pad_token_id

            def attach(self, model: Any) -> None:
                super().attach(model)
                self.module = model

            def generate(self, data: Any, greedy: bool = False) -> Any:
                return change(self, super().generate, data, greedy)

        return Broken

    return break_it


def broken_output(change: Callable[[Any, Any, Any], dict[str, Any]]) -> Callable[[type], type]:
    """Break the output: it is updated with `change(self, output, greedy)`."""

    def generate(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
        output = sound(data, greedy=greedy)
        output.update(change(engine, output, greedy))
        return output

    return broken_generate(generate)


def broken_input(change: Callable[[Any], dict[str, Any]]) -> Callable[[type], type]:
    """Break the input: the batch is updated with `change(data)`."""

    def generate(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
        return sound(type(data)({**data, **change(data)}), greedy=greedy)

    return broken_generate(generate)


def broken_weights(change: Callable[..., None]) -> Callable[[type], type]:
    """Break `load_weights`: it calls `change(self, sound, weights)`, which may keep weights in `self.loaded`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            loaded: dict[str, Any] | None = None

            def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
                super().__init__(config, tokenizer, **place)
                self.model_name = place["model_name"]

            def load_weights(self, weights: Any) -> None:
                change(self, super().load_weights, weights)

        return Broken

    return break_it


@contextmanager
def in_mode(module: Any, *, training: bool) -> Iterator[None]:
    """Put `module` in training or evaluation mode inside the context."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


def broken_forward(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[type], type]:
    """Break the forward: the keyword arguments of the module are updated with `change(kwargs)`."""

    def generate(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
        handle = engine.module.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, **change(kwargs)}), with_kwargs=True
        )
        try:
            return sound(data, greedy=greedy)
        finally:
            handle.remove()

    return broken_generate(generate)
