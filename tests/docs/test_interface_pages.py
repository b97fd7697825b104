"""The tables of the interfaces' pages, which a reader of the repository has, against the classes themselves."""

from __future__ import annotations

import inspect

import interface_pages
import pytest

from rlframework.interfaces.environment import Environment
from rlframework.interfaces.generation import GenerationEngine, GenerationResult
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework.plugins import builtin
from rlframework.policy.engine import Engine

PAGES = {
    "engine": Engine,
    "environment": Environment,
    "generation": GenerationEngine,
    "policy_worker": PolicyWorker,
    "worker_group": WorkerGroup,
}


def rows(page, described):
    """The rows of a class in a page's table, the class's own first, with their first cell as the key."""
    text = (interface_pages.DOCS / "interfaces" / f"{page}.md").read_text(encoding="utf-8")
    [of_class] = [part for part in text.split("\n| **`") if part.startswith(f"{described.__name__}`** | ")]
    lines = f"`{of_class}".replace("**", "", 1).partition("\n\n")[0].splitlines()
    return dict(line.strip("| ").split(" | ") for line in lines)


@pytest.mark.parametrize("page", PAGES)
def test_each_method_of_an_interface_is_a_row_with_its_parameters_and_meaning(page):
    described, table = PAGES[page], rows(page, PAGES[page])
    assert " ".join(described.__doc__.split()).startswith(table[f"`{described.__name__}`"])
    methods = [value for name, value in vars(described).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for method in methods:
        [row] = [row for row in table if row.startswith(f"`{method.__name__}(")]
        parameters = inspect.signature(method).parameters.keys() - {"self"}
        assert set(row.partition("(")[2][:-2].replace(" ", "").replace("*", "").split(",")) - {""} == parameters
        assert " ".join(method.__doc__.split()).startswith(table[row].replace("&#124;", "|"))


def test_fields_are_named_with_their_types():
    assert rows("generation", GenerationResult)["fields"] == (
        "`request_id: str`, `token_ids: Tensor`, `logprobs: Tensor`, `finish_reason: FinishReason`, "
        "`spans: tuple[WeightSpan, ...]`"
    )


def test_what_a_page_says_outside_the_table_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nText.\n\n::: rlframework.interfaces.generation.WeightSpan\n\nMore.\n")
    table = (
        "| name | meaning |\n| --- | --- |\n"
        "| **`WeightSpan`** | The tokens `start` to `end` (exclusive) of a completion, "
        "sampled with the weights of `version`. |\n"
        "| fields | `start: int`, `end: int`, `version: int` |"
    )
    text = page.read_text().replace("::: ", f"{interface_pages.BEGIN}\n\n{table}\n\n{interface_pages.END}\n\n::: ")
    assert interface_pages.page(page) == text
    page.write_text(text)
    assert interface_pages.page(page) == text


@pytest.mark.parametrize(
    ("hook", "page"),
    [("rlframework_algorithms", "algorithms/index.md"), ("rlframework_environments", "reference/configuration.md")],
)
def test_the_page_that_a_hook_refers_to_lists_what_core_provides(hook, page):
    text = (interface_pages.DOCS / page).read_text(encoding="utf-8")
    assert f"(../{page}) lists those of core" in (interface_pages.DOCS / "hooks" / f"{hook}.md").read_text("utf-8")
    assert [record.name for record in getattr(builtin, hook)() if f"`{record.name}`" not in text] == []
