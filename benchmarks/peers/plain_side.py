"""A hand-written loop with torch and transformers alone, in the order given or sorted by length first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain import PlainLoop, Rows
from steps import serve
from torch import Tensor


def make_loop(task: Mapping[str, Any], order: str) -> PlainLoop:
    """Return the loop of `benchmarks/plain.py`."""
    options = {name: task[name] for name in ("lr", "weight_decay", "clip")}
    return PlainLoop(Path(task["model"]), order, task["micro_rows"], **options)


def as_rows(sequences: list[Mapping[str, Any]]) -> Rows:
    """Return `sequences`, each with its `prompt` and `completion` as token ids, as right-padded rows."""
    whole = [torch.tensor(each["prompt"] + each["completion"]) for each in sequences]
    columns = torch.arange(max(map(len, whole)))
    lengths = torch.tensor([len(ids) for ids in whole])
    prompts = torch.tensor([len(each["prompt"]) for each in sequences])
    mask = (columns < lengths[:, None]) & (columns >= prompts[:, None])
    return Rows(torch.nn.utils.rnn.pad_sequence(whole, batch_first=True), lengths, mask.float())


def logprobs(order: str, task: Mapping[str, Any]) -> None:
    """Log-probabilities of the completions."""
    loop, rows = make_loop(task, order), as_rows(task["rows"])
    serve(lambda: loop.get_logprobs(rows), lambda result: {"logprobs": result[rows.mask > 0].tolist()})


def train(order: str, task: Mapping[str, Any]) -> None:
    """A step on the mean negative log-likelihood of the completions."""
    loop, rows = make_loop(task, order), as_rows(task["rows"])
    serve(lambda: loop.train(rows), lambda result: {"loss": result[0], "grad_norm": result[1]})


class DPOLoop(PlainLoop):
    """The same loop with a frozen copy of the model, for direct preference optimization."""

    def __init__(self, *args: Any, beta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.beta = beta
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def sums(self, batch: Rows, index: Tensor) -> Tensor:
        """`[len(index)]`: log-probability of each answer."""
        mask = self._cut(batch.mask, batch, index)[:, 1:]
        return (self._logprobs(batch, index) * mask).sum(1)

    @torch.no_grad()
    def reference_sums(self, batch: Rows, index: Tensor) -> Tensor:
        """`sums` of the frozen model."""
        trained, self.model = self.model, self.reference
        try:
            return self.sums(batch, index)
        finally:
            self.model = trained

    def train_pairs(self, batch: Rows) -> tuple[float, float]:
        """Do one optimizer step on `batch`, whose even rows are preferred to the odd rows after them."""
        self.optimizer.zero_grad(set_to_none=True)
        pairs, total = len(batch.lengths) // 2, 0.0
        longest = batch.lengths.view(pairs, 2).amax(1)
        order = longest.argsort() if self.order == "sorted" else torch.arange(pairs)
        for part in order.split(self.rows // 2):
            index = torch.stack([2 * part, 2 * part + 1], 1).flatten()
            scores = self.beta * (self.sums(batch, index) - self.reference_sums(batch, index))
            loss = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).sum() / pairs
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return total, float(norm)


def dpo(order: str, task: Mapping[str, Any]) -> None:
    """A step of direct preference optimization."""
    options = {name: task[name] for name in ("lr", "weight_decay", "clip", "beta")}
    loop = DPOLoop(Path(task["model"]), order, task["micro_rows"], **options)
    answers = [
        {"prompt": pair["prompt"], "completion": pair[which]}
        for pair in task["pairs"]
        for which in ("chosen", "rejected")
    ]
    rows = as_rows(answers)
    serve(lambda: loop.train_pairs(rows), lambda result: {"loss": result[0], "grad_norm": result[1]})


WORKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    f"{work.__name__} {order}": partial(work, order)
    for work in (logprobs, train, dpo)
    for order in ("padded", "sorted")
}
