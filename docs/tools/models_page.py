"""Write docs/models.md: what each kind of causal language model of transformers supports. It takes a few minutes.

    python docs/tools/models_page.py

`plugins/dtensor/tests/test_kinds.py` compares the page with what the worker does.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
HEADER = """\
# Models

Every kind of causal language model that transformers {version} offers, as a tiny model with random weights in which each
parameter matters, on the `dtensor` backend in fp32. **equal**: log-probabilities, gradients, the exported model and sampled
tokens are those of a plain forward of each row by itself, within 1e-5. What is not equal is rejected before any work.

| kind | padded, dynamic | packed | generation | why not |
| --- | --- | --- | --- | --- |
"""


def row_of(kind: str, found: Mapping[str, str]) -> str:
    """Return the row of `kind`, whose outcomes by mode are "equal" or the reason for a rejection."""
    columns = ("dynamic", "packed", "generation")
    words = ["equal" if found[column] == "equal" else "rejected" for column in columns]
    reasons = dict.fromkeys(found[column] for column in columns if found[column] != "equal")
    return f"| `{kind}` | {' | '.join(words)} | {'; '.join(reason.splitlines()[0] for reason in reasons)} |"


def rows_of_page(text: str) -> dict[str, str]:
    """Return the rows of the page by kind."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in rows}


def main() -> None:
    """Write the page."""
    sys.path.append(str(ROOT / "tests/fixtures"))
    import transformers
    from causal_kinds import KINDS, NO_TEXT_MODEL
    from kind_outcomes import outcomes

    from rlframework_dtensor.worker import DTensorPolicyWorker

    rows = []
    for kind in sorted(KINDS):
        if kind in NO_TEXT_MODEL:
            rows.append(f"| `{kind}` | | | | not tried: {NO_TEXT_MODEL[kind]} |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(kind, outcomes(KINDS[kind], Path(folder), DTensorPolicyWorker)))
    PAGE.write_text(HEADER.format(version=transformers.__version__) + "\n".join(rows) + "\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
