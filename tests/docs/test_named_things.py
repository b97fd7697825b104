"""Keys, messages, modules, files, extras and hooks that pages name are there; the tools that write pages by hand."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import interface_pages
import pytest
import sdk_pages
import typer
from typer.testing import CliRunner

from rlframework.base import logs, moved
from rlframework.plugins import builtin, hookspec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILES = (".json", ".yaml", ".md")
GAP = "…"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def named(text: str, keys: set[str]) -> set[str]:
    """The inline code of `text` that looks like a key; calls, paths and files do not."""
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    code = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    key = re.compile(rf"(?<![\w./])((?:{sections})(?:\.[a-z_]+)+)(?![\w(/])")
    found = {word for piece in code for word in key.findall(piece)}
    return {word for word in found if not word.endswith(FILES)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_the_keys_that_a_page_names_are_there(path, keys):
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "moving":  # the first column has other people's keys
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    assert named(text, keys) - keys == set()


def test_a_key_that_is_gone_is_found(keys):
    text = "`policy.optimiser.lr=1`, `policy.optimizer.lr`, `policy.train(batch)`, `a/policy/x.py`, `environment.json`"
    assert named(text, keys) - keys == {"policy.optimiser.lr"}


# -- messages ----------------------------------------------------------------------------------------------------------

MESSAGES = re.findall(r"^```text\n(.*?)\n```$", page("troubleshooting.md"), re.MULTILINE | re.DOTALL)


@cache
def literals() -> tuple[str, ...]:
    """All texts of the sources; what an f-string fills in is a gap."""
    files = [*(ROOT / "rlframework").rglob("*.py"), *(ROOT / "plugins").glob("*/rlframework_*/**/*.py")]
    return tuple(text for path in files for text in _texts(ast.parse(path.read_text(encoding="utf-8"))))


def _texts(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def missing(message: str) -> list[str]:
    """The pieces of `message` between its gaps that no text of the sources has."""
    pieces = [piece.strip(" `'\"():;,.") for piece in message.removeprefix("error: ").split(GAP)]
    long = [piece for piece in pieces if len(piece) >= 8]
    assert long, f"{message!r} has nothing to look for"
    return [piece for piece in long if not any(piece in text for text in literals())]


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES, ids=[message[:50] for message in MESSAGES])
def test_the_message_is_in_the_source(message):
    assert missing(message) == []


def test_a_message_that_changed_is_found():
    assert missing("this run is not what anybody ever said, … and never will be") != []
    assert len(MESSAGES) > 40


# -- modules, files, extras --------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\| (`rlframework[^|]*`) \| ([^|]+) \|", page("public.md"), re.MULTILINE)
PACKAGES = {name: text for names, text in ROWS for name in re.findall(r"`(rlframework[a-z_.]*)`", names)}


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_public_can_be_imported(name: str) -> None:
    module = import_module(name)
    assert module.__name__ == name  # not a name that has moved
    assert moved.new_name(name) is None
    if "`__all__`" in PACKAGES[name]:
        assert [each for each in module.__all__ if not hasattr(module, each)] == []


def test_the_page_of_what_is_public_names_packages_and_files_that_exist() -> None:
    authors = {"rlframework", "rlframework.interfaces", "rlframework.engine", "rlframework.generation.sdk"}
    assert authors <= set(PACKAGES)
    assert logs.LEVEL_VARIABLE in page("public.md")
    paths = set(re.findall(r"`([a-z_]+/[a-z_/.]+)`", page("public.md")))
    assert "rlframework/base/moved.py" in paths
    assert [path for path in paths if not os.path.exists(ROOT / path)] == []


def test_each_extra_is_on_the_page():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = page("install.md").partition("| extra | for |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`([\w-]+)`", row.partition(" | ")[0])]
    assert set(listed) == extras.keys() - {"dev", "docs"}


def test_the_container_has_all_distributions():
    dockerfile, text = (ROOT / "Dockerfile").read_text(encoding="utf-8"), page("install.md")
    folders = re.findall(r"plugins/\w+", dockerfile)
    assert sorted(folders) == sorted(f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml"))
    assert set(re.findall(r"--build-arg (\w+)=", text)) == set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    assert set(re.findall(r"plugins/\w+", text)) == set(folders)


# -- hooks and interfaces (that the pages that are made are current: `test_site`) --------------------------------------


def test_each_hook_is_in_the_index_and_those_that_act_on_the_page_of_plugins():
    hooks = [name for name in vars(hookspec) if name.startswith("rlframework_")]
    assert [hook for hook in hooks if f"`{hook}`" not in page("hooks/index.md")] == []
    section = page("plugins.md").partition("## Hooks that act\n")[2].partition("\n## ")[0]
    acting = re.findall(
        r"^::: rlframework\.plugins\.hookspec\.(rlframework_\w+)$", page("hooks/acting.md"), re.MULTILINE
    )
    assert set(re.findall(r"`(rlframework_\w+)\(", section)) == set(acting)


def test_the_command_of_the_page_of_plugins_prints_the_last_metrics(tmp_path):
    text = re.search(r'^```python title="my_commands.py"\n(.*?)^```$', page("plugins.md"), re.MULTILINE | re.DOTALL)[1]
    plugin = {}
    exec(text, plugin)  # noqa: S102 - our page
    app = typer.Typer()
    app.callback()(lambda: None)
    plugin["rlframework_commands"](app=app)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = CliRunner().invoke(app, ["last-step", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, '{"step": 2}\n')


@pytest.mark.parametrize(
    ("hook", "listing"),
    [("rlframework_algorithms", "algorithms/index.md"), ("rlframework_environments", "reference/configuration.md")],
)
def test_the_page_that_a_hook_refers_to_lists_what_core_provides(hook, listing):
    assert f"(../{listing}) lists those of core" in page(f"hooks/{hook}.md")
    assert [record.name for record in getattr(builtin, hook)() if f"`{record.name}`" not in page(listing)] == []


def test_the_table_of_a_class_is_put_before_its_directive(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Title\n\nText.\n\n::: rlframework.interfaces.generation.WeightSpan\n\nMore.\n")
    table = (
        "| name | meaning |\n| --- | --- |\n"
        "| **`WeightSpan`** | The tokens `start` to `end` (exclusive) of a completion, "
        "sampled with the weights of `version`. |\n"
        "| fields | `start: int`, `end: int`, `version: int` |"
    )
    text = path.read_text().replace("::: ", f"{interface_pages.BEGIN}\n\n{table}\n\n{interface_pages.END}\n\n::: ")
    assert interface_pages.page(path) == text
    path.write_text(text)
    assert interface_pages.page(path) == text


def test_an_exported_name_is_listed_where_it_is_assigned_and_has_a_meaning():
    import_module("rlframework.policy.checkpoint_io")  # imports FIRST
    names = {"FIRST": "policy.checkpoint.saved", "Engine": "policy.engine", "process_groups": "workers.process_groups"}
    for name, module in names.items():
        assert sdk_pages.defining_module(import_module("rlframework.engine"), name) == f"rlframework.{module}"
    for sdk in map(import_module, ("rlframework.engine", "rlframework.generation.sdk")):
        rows = dict(sdk_pages.rows(sdk))
        assert all(rows.values())
        listed = [re.match(r"`(\w+)", cell)[1] for cell in rows if not cell.startswith("**")]
        assert sorted(listed) == sorted(sdk.__all__)
