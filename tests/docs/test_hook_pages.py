"""The pages of hooks and plugins against the specifications of the hooks, and the command that docs/plugins.md adds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlframework.plugins import hookspec

DOCS = Path(__file__).parents[2] / "docs"
HOOKS = sorted(name for name in vars(hookspec) if name.startswith("rlframework_"))


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_in_the_index_and_described_on_a_page(hook):
    assert f"`{hook}`" in (DOCS / "hooks" / "index.md").read_text(encoding="utf-8")
    directive = f"::: rlframework.plugins.hookspec.{hook}\n"
    pages = [page for page in (DOCS / "hooks").glob("*.md") if directive in page.read_text(encoding="utf-8")]
    assert len(pages) == 1


def test_the_page_of_plugins_names_each_hook_that_acts():
    section = (
        (DOCS / "plugins.md").read_text(encoding="utf-8").partition("## Hooks that act\n")[2].partition("\n## ")[0]
    )
    acting = (DOCS / "hooks" / "acting.md").read_text(encoding="utf-8")
    described = re.findall(r"^::: rlframework\.plugins\.hookspec\.(rlframework_\w+)$", acting, re.MULTILINE)
    assert set(re.findall(r"`(rlframework_\w+)\(", section)) == set(described)


def test_the_command_of_the_page_prints_the_last_metrics(tmp_path):
    text = (DOCS / "plugins.md").read_text(encoding="utf-8")
    plugin = {}
    exec(re.search(r'^```python title="my_commands.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)[1], plugin)  # noqa: S102
    app = typer.Typer()
    app.callback()(lambda: None)
    plugin["rlframework_commands"](app=app)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = CliRunner().invoke(app, ["last-step", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, '{"step": 2}\n')
