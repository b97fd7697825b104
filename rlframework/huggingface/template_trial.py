"""Program that renders the chat template on its standard input, for `chat_template`, with limits of time and memory.

A template is code that comes with a model: it may loop without end, or write more than fits into memory. Exit codes: 0
if it ends, also with an error of its own; `TOO_MUCH` if it needs more memory than allowed.
"""

from __future__ import annotations

import sys

SECONDS, MEMORY, TOO_MUCH = 5, 1 << 30, 3


def main() -> int:
    """Render a conversation of three turns, and return the exit code."""
    import json
    import resource

    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = lambda message: 1 / 0
    environment.globals["strftime_now"] = lambda pattern: pattern
    turns = [{"role": role, "content": "a b"} for role in ("user", "assistant", "user")]
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    try:
        environment.from_string(text).render(messages=turns, tools=None, add_generation_prompt=True, **special)
    except MemoryError:
        return TOO_MUCH
    except Exception:  # noqa: BLE001 - rendering a real conversation reports it
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
