"""Score answers to tasks of reasoning-gym, without evaluating them as Python code.

Some scorers call `eval` on an answer; see `safe_answer` for what they are given instead. The package is imported with
this module, since that takes seconds, which would otherwise count as those of the first answer.
"""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from typing import Any

import reasoning_gym  # noqa: F401 - see above

from rlframework.interfaces.environment import Sample
from rlframework_environments.reasoning_gym import dataset_of

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` on the answer (reasoning-gym 0.1.25)."""

FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers call `sympy.parse_expr`, which calls `eval`, on the answer."""

_FORMULA = re.compile(r"[\w\s+\-*/^()=,.]{1,500}")
_NAMES = r"(a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[Aa]bs|[A-Za-z])"


def score(sample: Sample, completion: str) -> dict[str, float]:
    """Score one answer with the task's own scorer; what it gives is between 0 and 1."""
    given = sample.metadata
    answer = safe_answer(given["task"], completion.strip())
    if answer is None:
        return {"reward": 0.0, "accuracy": 0.0}
    data = _scorer(given["task"], json.dumps(given["arguments"], sort_keys=True))
    reward = float(data.score_answer(answer=answer, entry=given["entry"]))
    return {"reward": reward, "accuracy": float(reward >= 1.0)}


def safe_answer(task: str, answer: str) -> str | None:
    """Return `answer` if the scorer of `task` may be given it, else None, which is a wrong answer.

    Scorers that call `eval` are given Python literals alone, besides rows of digits, capital letters and underscores;
    those that parse formulas, formulas of numbers, single letters and the usual functions, without attributes.
    """
    if task in LITERALS:
        return answer if re.fullmatch(r"[0-9A-Z_\s]*", answer) or _is_literal(answer) else None
    if task in FORMULAS:
        words = re.findall(r"[^\W\d]\w*", answer)
        usual = all(re.fullmatch(_NAMES, word) for word in words)
        powers = re.findall(r"\*\*|\^", answer)
        short = len(powers) <= 20 and not re.search(r"\d{16}", answer)
        attribute = re.search(r"\.\s*[^\W\d]", answer)
        return answer if _FORMULA.fullmatch(answer) and usual and short and not attribute else None
    return answer


@lru_cache(8)
def _scorer(task: str, arguments: str) -> Any:
    """The data set that scores, whose creation may read files; `arguments` as JSON."""
    return dataset_of(task, {**json.loads(arguments), "seed": 0, "size": 1})


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
