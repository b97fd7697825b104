"""How the tests of pages run a `shell` block: by bash, but for plain lines of `rlframework`.

Such a line is run in a process that is forked from one which has imported torch and transformers: that is most of what
a command takes, and the pages have some twenty. `tests/packaging` and the examples run the command as it is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from probe_forked import run_forked

_PLAIN = re.compile(r"^(! )?rlframework ([^|<>&;$`]*)$")


def run_shell(commands: str, folder: Path, where: str, environment: Mapping[str, str], packages: str = "") -> str:
    """Return the output of `commands` run in `folder`; they must succeed, except lines that begin with `! `.

    `environment` is beside this process's own; `packages` is a folder of packages that comes before it.
    """
    printed = ""
    for plain, part in _parts(commands):
        code, more = _call(part, folder, environment, packages) if plain else _bash(part, folder, environment)
        printed += more
        assert code == 0, f"{where}: exit code {code}\n{part}\n{printed[-6000:]}"
    return printed


def _parts(commands: str) -> Iterator[tuple[bool, str]]:
    """Plain lines of `rlframework`, each by itself, and what lies between them."""
    between: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", commands).splitlines():
        plain = re.sub(r"\s+#.*$", "", line)
        if not _PLAIN.match(plain):
            between.append(line)
            continue
        if between:
            yield False, "\n".join(between)
            between = []
        yield True, plain
    if between:
        yield False, "\n".join(between)


def _bash(commands: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    negated = re.sub(r"^! (.*)$", r"if \1; then echo 'this must fail'; exit 1; fi", commands, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", negated],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def _call(line: str, folder: Path, environment: Mapping[str, str], packages: str) -> tuple[int, str]:
    words = shlex.split(line)
    must_fail = words[0] == "!"
    arguments = words[2:] if must_fail else words[1:]
    done = run_forked(_command, arguments, packages, folder=folder, environment=environment)
    printed = done.stdout + done.stderr
    if must_fail:
        return (0, printed) if done.returncode in (1, 2) else (1, f"{printed}\nthis must fail")
    return done.returncode, printed


def _command(words: list[str], packages: str) -> None:
    if packages:
        site.addsitedir(packages)
    sys.argv = ["rlframework", *words]
    from rlframework.cli import main

    main()
