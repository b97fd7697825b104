"""Command that serves a model: serve."""

from __future__ import annotations

import secrets
from typing import Annotated

from typer import Argument, Option

from rlframework.cli.common import Debug, OldOverrides, Overrides, TrustRun, app, with_old_overrides
from rlframework.errors import UserError


@app.command()
def serve(
    name: Annotated[str, Argument(metavar="RUN_OR_MODEL", help="A run's output_dir, or a model directory or name.")],
    overrides: Overrides = None,
    host: Annotated[
        str, Option(help="Address to listen on. Others than loopback are open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    token: Annotated[
        str | None,
        Option(envvar="RLFRAMEWORK_TOKEN", help="Bearer token that clients need. Default: a random one, printed."),
    ] = None,
    old_overrides: OldOverrides = None,
    trust_run: TrustRun = False,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's chat completions, completions and Responses, until Ctrl-C.

    \b
    rlframework serve runs/quickstart
    rlframework serve HuggingFaceTB/SmolLM2-135M-Instruct generation.max_new_tokens=512 --port 9000
    """
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token):
        raise UserError("--token: give at least 16 printable ASCII characters without spaces, or leave it out")
    from rlframework.evaluation.plan import generation_config

    config = generation_config(name, overrides=with_old_overrides(overrides or (), old_overrides), trust_run=trust_run)
    from rlframework.rollout.endpoint.serving import serve as serve_model
    from rlframework.runner.parts import build_generation, open_images

    sampling = config.generation
    key = token or secrets.token_urlsafe(32)

    def started(base_url: str) -> None:
        print(f"base_url={base_url}\napi_key={key if token is None else '(as given)'}")
        print(
            f"requests without their own are answered with temperature={sampling.temperature:g}, "
            f"top_p={sampling.top_p:g} and at most {sampling.max_new_tokens} tokens, which is also the most; "
            "generation.temperature=... and generation.max_new_tokens=... change that"
        )
        print("Ctrl-C ends it", flush=True)

    with build_generation(config) as (tokenizer, policy, generation):
        section, inputs = config.environment.images, open_images(config, tokenizer)
        serve_model(
            tokenizer,
            generation,
            model="policy",
            token=key,
            host=host,
            port=port,
            started=started,
            policy=policy,
            images=None if section is None or inputs is None else (section, inputs),
        )
    print("ended")
