"""The site: built strictly and without warnings, of pages that are current; its links hold on the git host too."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from html import unescape
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlframework.plugins import hookspec

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]  # one build serves all

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOOLS = DOCS / "tools"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
)
HOOKS = sorted(name for name in vars(hookspec) if name.startswith("rlframework_"))
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def build(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *words]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement of its successor
    return subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def shown(site: Path, page: str) -> str:
    """The text of a built page, without its marks and spaces."""
    return re.sub(r"\s+", "", unescape(re.sub(r"<[^>]+>", "", (site / page).read_text(encoding="utf-8"))))


def test_nothing_comes_from_another_host(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(script|img|iframe)[^>]* src="(https?:)?//', text), page
        assert not re.search(r'<link [^>]*rel="(stylesheet|preconnect|preload)"[^>]*href="(https?:)?//', text), page


def test_the_search_works_where_the_site_is_opened_from_disk(site):
    """Each page loads the stand-in for a worker before the theme's script, and the index is a script too."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    name, _, text = index.partition(" = ")
    assert name == "var __index"
    assert {"faq.html", "roadmap.html"} <= {page["location"] for page in json.loads(text)["docs"]}
    for page in site.rglob("*.html"):
        scripts = re.findall(r'<script src="([^"]+)"', page.read_text(encoding="utf-8"))
        found = [place for place, script in enumerate(scripts) if script.endswith("tools/search_worker.js")]
        [bundle] = [place for place, script in enumerate(scripts) if "/bundle." in script]
        assert len(found) == 1, page
        assert found[0] < bundle, page
    assert (site / "tools" / "search_worker.js").is_file()
    assert not list(site.glob("sitemap*"))  # without the site's address it is empty


@pytest.mark.thorough
def test_a_page_of_something_that_is_gone_does_not_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n::: rlframework.interfaces.loss.NoSuchLoss\n")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    text = text.replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}").replace(
        "hooks: [docs/tools/site_hooks.py]", ""
    )
    text = text.replace("extensions: [docs/", f"extensions: [{DOCS}/").replace("paths: [.]", f"paths: [{ROOT}]")
    (tmp_path / "mkdocs.yml").write_text(text)
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "rlframework.interfaces.loss.NoSuchLoss" in done.stderr


def interfaces() -> list[tuple[str, type]]:
    """The public classes of `rlframework.interfaces`, and the primitives."""
    modules = [
        f"rlframework.interfaces.{path.stem}" for path in (ROOT / "rlframework" / "interfaces").glob("[a-z]*.py")
    ]
    found = []
    for name in sorted([*modules, "rlframework.policy.engine"]):
        for word, value in vars(import_module(name)).items():
            if inspect.isclass(value) and value.__module__ == name and not word.startswith("_"):
                found.append((f"{name}.{word}", value))
    return found


INTERFACES = interfaces()
DESCRIBED = {name: page for page in DOCS.rglob("*.md") for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


def assert_signature(function: Any, text: str) -> None:
    for parameter in inspect.signature(function).parameters.values():
        annotation = "" if parameter.annotation is inspect.Parameter.empty else f":{parameter.annotation}"
        if parameter.name != "self":
            assert f"{parameter.name}{annotation}".replace(" ", "").replace("'", "") in text.replace("'", ""), function


@pytest.mark.parametrize(("name", "described"), INTERFACES, ids=[name for name, _ in INTERFACES])
def test_each_interface_has_a_page_with_its_methods_and_their_parameters(site, name, described):
    page = DESCRIBED[name].relative_to(DOCS).with_suffix(".html").as_posix()
    html, text = (site / page).read_text(encoding="utf-8"), shown(site, page)
    assert f'id="{name}"' in html
    own = {field.name: field.type for field in fields(described)} if is_dataclass(described) else {}
    assert [field for field, kind in own.items() if f"{field}:{kind}".replace(" ", "") not in text] == []
    for method, function in vars(described).items():
        if not method.startswith("_") and inspect.isfunction(function) and method not in own:
            assert f'id="{name}.{method}"' in html
            assert_signature(function, text)
            first = (function.__doc__ or "").split(".")[0].split("`")[0]
            assert re.sub(r"\s+", "", first) in text, f"{name}.{method} has no docstring on its page"


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_has_a_page_with_its_parameters_and_its_example(site, hook):
    page = DESCRIBED[f"rlframework.plugins.hookspec.{hook}"].relative_to(DOCS).with_suffix(".html").as_posix()
    assert f'id="rlframework.plugins.hookspec.{hook}"' in (site / page).read_text(encoding="utf-8")
    function, text = getattr(hookspec, hook), shown(site, page)
    assert_signature(function, text)
    examples = re.findall(r"^ *>>> (.*)$", function.__doc__, re.MULTILINE)
    assert examples
    assert all(re.sub(r"\s+", "", line) in text for line in examples)


@pytest.mark.thorough
def test_pages_that_are_made_are_current():
    done = subprocess.run(
        [sys.executable, str(TOOLS / "pages.py"), "--check"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pages_that_are_quickly_made_are_current():
    """All but those of estimates for many models, which take long; `test_recipes` compares the rows of recipes.md."""
    import pages

    quick = pages.PAGES.keys() - {"memory.md", "recipes.md"}
    assert [name for name in sorted(quick) if (DOCS / name).read_text(encoding="utf-8") != pages.PAGES[name]()] == []


def anchors(page: Path) -> set[str]:
    """Those that the git host gives to the headings of `page`."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_of_the_repository(page):
    text = re.sub(r"`[^`]*`", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_lists_and_tables_are_read_as_such_on_the_site():
    """The git host also takes a list without an empty line before it; the site takes it for more of the paragraph."""
    for page in PAGES:
        lines = FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
        for above, line in pairwise(lines):
            starts = re.match(r"(- |\d+\. |\| )", line)
            inside = re.match(r"( *- | *\d+\. |\|| {2,})", above) or not above.strip()
            assert not starts or inside, f"{page.name}: {line}"
