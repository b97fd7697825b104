"""The oracle: computes the correct numbers with a plain single-process program.

It uses torch and transformers only and imports nothing of rlframework (enforced by import-linter): full logits, padded
or single rows, no parallelism, its own losses and optimizer groups. A *batch* is a mapping with `input_ids [B, S]`,
`input_lengths [B]`, `token_mask [B, S]`, `sample_mask [B]` and the fields its loss reads. Speed and memory are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class OracleStep:
    """One optimizer step: the loss before it, the gradient's L2 norm before clipping, and the gradients.

    Parameters that the loss does not depend on have no gradient, and AdamW leaves them alone.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


class Oracle:
    """The model at `path` with AdamW: `weight_decay` for parameters of two or more dimensions, none for others.

    `router_loss`: weight of a mixture's load-balancing loss. `max_grad_norm`: None disables clipping. `temperature`: of
    log-probabilities and policy-gradient losses. `head`: load a model with one number per token in place of the
    language head, from its files ("checkpoint") or as zeros on a language model ("zeros"); then only `values`, the
    losses that read them, and training work.
    """

    auto_class = "AutoModelForCausalLM"
    """The class of transformers that loads a model with a language head."""

    def __init__(
        self,
        path: Any,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        router_loss: float = 0.0,
        head: str | None = None,
    ) -> None:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind: Any = getattr(transformers, self.auto_class if head is None else "AutoModelForSequenceClassification")
        labels = {} if head is None else {"num_labels": 1}
        self.model = kind.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", trust_remote_code=False, **labels
        )
        if head == "zeros":
            torch.nn.init.zeros_(self.model.score.weight)
        self.model.eval()  # no dropout: scoring and training use the same function
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.router_loss_coef = router_loss
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=lr,
            betas=betas,
            eps=eps,
            foreach=False,
        )

    # -- scoring ------------------------------------------------------------------------------------------------------

    def differentiable_logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Return log p(token i | tokens before i), `[B, S]`, with gradient; 0 at position 0 and at padding."""
        targets = batch["input_ids"][:, 1:].unsqueeze(-1)
        chosen = self._distributions(batch, temperature).gather(-1, targets).squeeze(-1)
        return torch.nn.functional.pad(chosen, (1, 0)) * _real(batch)

    def differentiable_entropy(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Return entropies in nats, `[B, S]`: entry i is of the distribution token i was drawn from; 0 where `logprobs`
        is.
        """
        logs = self._distributions(batch, temperature)
        return torch.nn.functional.pad(-(logs.exp() * logs).sum(-1), (1, 0)) * _real(batch)

    def differentiable_set_logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Return log-probabilities of the tokens `token_sets [B, S, K]` at each position; 0 where `logprobs` is."""
        chosen = self._distributions(batch, temperature).gather(-1, batch["token_sets"][:, 1:].long())
        return torch.nn.functional.pad(chosen, (0, 0, 1, 0)) * _real(batch)[..., None]

    logprobs = torch.no_grad()(differentiable_logprobs)
    entropy = torch.no_grad()(differentiable_entropy)
    set_logprobs = torch.no_grad()(differentiable_set_logprobs)
    """The same without gradient."""

    def top_logits(self, batch: Batch, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the `k` largest logits over the temperature and their tokens, `[B, S, k]` each; entry i predicts token
        i.

        Both are 0 where `logprobs` is.
        """
        with torch.no_grad():
            logits = self._logits(batch)
        over = logits[:, :-1].float() / (self.temperature if temperature is None else temperature)
        real = _real(batch)[:, 1:, None]
        found = over.sort(dim=-1, descending=True)
        values, tokens = found.values[..., :k] * real, found.indices[..., :k] * real.long()
        return torch.nn.functional.pad(values, (0, 0, 1, 0)), torch.nn.functional.pad(tokens, (0, 0, 1, 0))

    def most_likely(self, batch: Batch) -> Tensor:
        """Return the most likely token given the tokens before i in entry i, `[B, S]` int64; 0 at position 0."""
        with torch.no_grad():
            return torch.nn.functional.pad(self._distributions(batch, 1.0).argmax(-1), (1, 0))

    def values(self, batch: Batch) -> Tensor:
        """Return the head's output at each token, `[B, S]`, 0 at padding; with gradient. For an oracle with `head`."""
        real = _real(batch)
        states = self.model.base_model(
            input_ids=batch["input_ids"], attention_mask=real.long(), use_cache=False
        ).last_hidden_state
        found: Tensor = self.model.score(states)[..., 0].float() * real
        return found

    def last_values(self, batch: Batch) -> Tensor:
        """Return `values` at the last token of each row, `[B]`."""
        rows = torch.arange(len(batch["input_lengths"]))
        return self.values(batch)[rows, batch["input_lengths"] - 1]

    def _distributions(self, batch: Batch, temperature: float | None) -> Tensor:
        """Return the log-softmax of the logits that predict positions 1 to S - 1, `[B, S - 1, V]`."""
        over = self.temperature if temperature is None else temperature
        return torch.log_softmax(self._logits(batch)[:, :-1].float() / over, dim=-1)

    def _forward(self, **inputs: Any) -> Any:
        """Return the output of the model."""
        return self.model(**inputs, use_cache=False)

    def _logits(self, batch: Batch) -> Tensor:
        """Return the logits `[B, S, V]`.

        Each row is computed alone, without padding, if the rotary frequencies of the model depend on the length:
        transformers takes that of the longest row for all of them.
        """
        ids: Tensor = batch["input_ids"]
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            logits: Tensor = self._forward(input_ids=ids, attention_mask=_real(batch).long()).logits
            return logits
        rows = [row[None, :length] for row, length in zip(ids, batch["input_lengths"].tolist(), strict=True)]
        alone = [self._forward(input_ids=row).logits[0] for row in rows]
        return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, ids.shape[1] - len(row))) for row in alone])

    # -- losses -------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, kind: str) -> Tensor:
        """Return the loss `kind` over valid tokens.

        `nll`: mean over all valid tokens. `pg`, `sequence_pg`: clipped policy gradient (ratios in 0.8 to 1.2), averaged
        over tokens, or over sequences of each sequence's mean. Valid tokens are selected by `token_mask` and
        `sample_mask`, never position 0. `pairs`: minus the log-sigmoid of how much the mean log-probability of a row
        exceeds that of the next row with the same `group_ids`, summed over these pairs, over the valid rows. `sets`:
        `nll`, plus that of the tokens `token_sets [B, S, K]` at each position, times their `set_weights [B, S, K]`.
        With a `head`: `values`, the squared difference of the value before each valid token and the token's advantage,
        mean over tokens; `scores`, that of the value at a row's last token and its first advantage, mean over rows;
        `score_pairs`, like `pairs`, of values at last tokens, which are 0 for rows that are not valid.
        """
        mask: Tensor = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        if kind == "nll":
            return -(self.differentiable_logprobs(batch, 1.0)[:, 1:] * mask).sum() / mask.sum()
        if kind == "sets":
            sets = batch["token_sets"][:, 1:].long()
            others = self._distributions(batch, 1.0).gather(-1, sets) * batch["set_weights"][:, 1:]
            chosen: Tensor = self.differentiable_logprobs(batch, 1.0)[:, 1:] + others.sum(-1)
            return -(chosen * mask).sum() / mask.sum()
        if kind == "values":
            errors: Tensor = (self.values(batch)[:, :-1] - batch["advantages"][:, 1:]).square()
            return (errors * mask).sum() / mask.sum()
        if kind == "scores":
            errors = (self.last_values(batch) - batch["advantages"][:, 0]).square()
            scored: Tensor = (errors * batch["sample_mask"]).sum() / float(batch["sample_mask"].sum())
            return scored
        if kind in ("pairs", "score_pairs"):
            if kind == "pairs":
                means = (self.differentiable_logprobs(batch, 1.0)[:, 1:] * mask).sum(1) / mask.sum(1).clamp(min=1.0)
            else:
                means = self.last_values(batch) * batch["sample_mask"]
            ids: list[int] = batch["group_ids"].tolist()
            after = {row: ids.index(one, row + 1) for row, one in enumerate(ids) if one in ids[row + 1 :]}
            margins = torch.stack([means[row] - means[other] for row, other in after.items()])
            return -torch.nn.functional.logsigmoid(margins).sum() / float(batch["sample_mask"].sum())
        logprobs = self.differentiable_logprobs(batch, self.temperature)[:, 1:]
        ratio = torch.exp(logprobs - batch["prev_logprobs"][:, 1:])
        advantages = batch["advantages"][:, 1:]
        terms: Tensor = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
        if kind == "pg":
            return terms.sum() / mask.sum()
        if kind == "sequence_pg":
            means = terms.sum(1) / mask.sum(1).clamp(min=1.0)
            return means.sum() / float(batch["sample_mask"].sum())
        raise ValueError(
            f"unknown loss {kind!r}; it must be nll, pg, sequence_pg, pairs, sets, values, scores or score_pairs"
        )

    def router_loss(self, batch: Batch) -> Tensor:
        """Return the load-balancing loss over all blocks and all tokens of rows that the losses use.

        It is the number of experts times the sum over experts of their share of all choices times their mean
        probability.
        """
        real, counted = _real(batch), batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"] > 0
        logits = self.model(
            input_ids=batch["input_ids"], attention_mask=real.long(), use_cache=False, output_router_logits=True
        ).router_logits
        selected = (real * counted[:, None]).reshape(-1) > 0
        probabilities = torch.cat([torch.softmax(layer, -1)[selected] for layer in logits])
        choices = probabilities.topk(self.model.config.num_experts_per_tok, dim=-1).indices
        share = torch.zeros_like(probabilities).scatter(1, choices, 1.0).mean(0)
        return probabilities.shape[1] * (share * probabilities.mean(0)).sum()

    def gradients(self, batch: Batch, kind: str) -> dict[str, Tensor]:
        """Return the gradient of each parameter without changing any."""
        trained = self._trained()
        found = torch.autograd.grad(self._whole_loss(batch, kind), list(trained.values()))
        return expert_by_expert(dict(zip(trained, found, strict=True)))

    # -- training -----------------------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, by name."""
        return dict(self.model.named_parameters())

    def step(self, batch: Batch, kind: str, lr: float | None = None) -> OracleStep:
        """Take one AdamW step, at `lr` if given."""
        for parameter in self._trained().values():
            parameter.grad = None
        self._whole_loss(batch, kind).backward()
        with torch.no_grad():
            loss = self.loss(batch, kind).item()
        return self.descend(loss, lr)

    def _whole_loss(self, batch: Batch, kind: str) -> Tensor:
        """Return the minimized loss, including the router loss if it has a weight."""
        loss = self.loss(batch, kind)
        return loss + self.router_loss_coef * self.router_loss(batch) if self.router_loss_coef else loss

    def descend(self, loss: float, lr: float | None = None) -> OracleStep:
        """Take a step on the parameters' current gradients, which belong to `loss`."""
        gradients = {name: one.grad.clone() for name, one in self._trained().items() if one.grad is not None}
        norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum())
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for parameter in self._trained().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.max_grad_norm / norm)
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        self.optimizer.step()
        return OracleStep(loss, norm.item(), expert_by_expert(gradients))

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights under the names of `save_pretrained`; a tied head is included once."""
        return expert_by_expert({name: weight.detach().clone() for name, weight in self.model.named_parameters()})


def expert_by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename `tensors` to the names of `save_pretrained`, which stores each expert of a mixture separately.

    The experts of gpt-oss, which have biases, are stored together.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, kind = name.rpartition(".")
        if f"{experts}.gate_up_proj_bias" in tensors:
            found[name] = tensor
        elif kind == "gate_up_proj":
            for number, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                found |= {f"{experts}.{number}.gate_proj.weight": gate, f"{experts}.{number}.up_proj.weight": up}
        elif kind == "down_proj":
            found |= {f"{experts}.{number}.down_proj.weight": one for number, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _real(batch: Batch) -> Tensor:
    """Return 1 at tokens and 0 at padding, `[B, S]`."""
    ids: Tensor = batch["input_ids"]
    lengths: Tensor = batch["input_lengths"]
    return (torch.arange(ids.shape[1]) < lengths[:, None]).float()
