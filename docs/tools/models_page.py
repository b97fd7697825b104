"""Write docs/reference/models.md: what each kind of causal model of transformers supports. It takes a few minutes.

    python docs/tools/models_page.py            # all kinds
    python docs/tools/models_page.py llama glm  # their rows

`plugins/dtensor/tests/test_kinds.py` compares the page with what the worker does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/models.md"
TARGET = "rlframework_dtensor.worker:DTensorPolicyWorker"
COLUMNS = ("dynamic", "packed", "context", "generation")
HEADER = """\
# Models

Every kind of causal language model that transformers {version} offers, as a tiny model with random weights in which
each parameter matters, on the `dtensor` backend in fp32 on a CPU.

- **padded, dynamic** and **packed** are the modes of [`policy.batching`](configuration.md), **context** is
  `policy.parallelism.context: 2` with packed rows, **generation** is that of
  [the embedded engine](../generation_engines.md).
- **equal**: log-probabilities, gradients, the exported model and the most likely tokens are those of a plain forward of
  each row by itself, within 1e-5.
- **rejected**: the run ends with the reason in the last column, before any weights are loaded.

A kind is the `model_type` in the model's `config.json`. `python docs/tools/models_page.py` writes this page, and a test
compares it with what the worker does.

| kind | padded, dynamic | packed | context | generation | why not |
| --- | --- | --- | --- | --- | --- |
"""


def row_of(kind: str, found: Mapping[str, str]) -> str:
    """Return the row of `kind`, whose outcomes by column are "equal", "differs: ..." or the reason for a rejection."""
    words = [_word(found[column]) for column in COLUMNS]
    reasons = dict.fromkeys(found[column] for column in COLUMNS if found[column] != "equal")
    why = "<br>".join(reason.splitlines()[0].replace("|", "\\|") for reason in reasons)
    return f"| `{kind}` | {' | '.join(words)} | {why} |"


def _word(outcome: str) -> str:
    return outcome if outcome == "equal" else "**differs**" if outcome.startswith("differs") else "rejected"


def rows_of_page(text: str) -> dict[str, str]:
    """Return the rows of the page by kind."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in rows}


def version_of_page(text: str) -> str:
    """Return the version of transformers that the page was written with."""
    return text.split("that transformers ")[1].split()[0]


def main(kinds: list[str]) -> None:
    """Write the page; with `kinds`, only their rows."""
    sys.path.append(str(ROOT / "tests/fixtures"))
    import transformers
    from causal_kinds import KINDS
    from kind_outcomes import outcomes
    from kind_ranks import ContextRanks

    from rlframework_dtensor.worker import DTensorPolicyWorker

    transformers.utils.logging.disable_progress_bar()
    rows = rows_of_page(PAGE.read_text()) if kinds and PAGE.exists() else {}
    ranks = ContextRanks(TARGET, modes=["packed"])
    for kind in kinds or sorted(KINDS):
        with tempfile.TemporaryDirectory() as folder:
            found = outcomes(KINDS[kind], Path(folder), DTensorPolicyWorker)
            found["context"] = ranks.outcome(Path(folder))
        rows[kind] = row_of(kind, found)
    ranks.close()
    PAGE.write_text(
        HEADER.format(version=transformers.__version__) + "\n".join(rows[kind] for kind in sorted(rows)) + "\n"
    )
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
