"""The oracle: what the numbers must be, computed by a plain program in one process.

Torch and transformers only. It imports nothing of rlframework (import-linter holds this): whole logits, padded rows, no
parallelism, its own losses and optimizer groups. A *batch* is a mapping with `input_ids [B, S]`, `input_lengths [B]`,
`token_mask [B, S]`, `sample_mask [B]` and what the loss reads. Left out: speed, and every form of memory saving.
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
    """One optimizer step: the loss before it, the L2 norm of the gradient before clipping, the gradients themselves."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


class Oracle:
    """A model at `path` with AdamW in two groups: `weight_decay` for two and more dimensions, none for fewer.

    `router_loss`: weight of the loss that evens out a mixture's experts. `max_grad_norm`: None does not clip.
    `temperature`: of log-probabilities and of the policy-gradient losses.
    """

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
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self.model.eval()  # no dropout: scoring and training are of one function
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

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """`[B, S]`: entry i is log p(token i | tokens before i); 0 at position 0 and at padding. No gradient."""
        with torch.no_grad():
            return self._logprobs(batch, self.temperature if temperature is None else temperature)

    def differentiable_logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """The same with gradient, for a loss of somebody else's: see `descend`."""
        return self._logprobs(batch, self.temperature if temperature is None else temperature)

    def entropy(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """`[B, S]`, in nats: entry i is of the distribution that token i was drawn from; 0 where `logprobs` is."""
        with torch.no_grad():
            logs = self._distributions(batch, self.temperature if temperature is None else temperature)
            return torch.nn.functional.pad(-(logs.exp() * logs).sum(-1), (1, 0)) * _real(batch)

    def top_logits(self, batch: Batch, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """`[B, S, k]` each: the largest logits over the temperature, and their tokens; entry i is of what predicts i.

        0 where `logprobs` is.
        """
        with torch.no_grad():
            logits = self.model(
                input_ids=batch["input_ids"], attention_mask=_real(batch).long(), use_cache=False
            ).logits
        over = logits[:, :-1].float() / (self.temperature if temperature is None else temperature)
        real = _real(batch)[:, 1:, None]
        found = over.sort(dim=-1, descending=True)
        values, tokens = found.values[..., :k] * real, found.indices[..., :k] * real.long()
        return torch.nn.functional.pad(values, (0, 0, 1, 0)), torch.nn.functional.pad(tokens, (0, 0, 1, 0))

    def likeliest(self, batch: Batch) -> Tensor:
        """`[B, S]` int64: entry i is the token that is likeliest after those before i; 0 at position 0."""
        with torch.no_grad():
            return torch.nn.functional.pad(self._distributions(batch, 1.0).argmax(-1), (1, 0))

    def _distributions(self, batch: Batch, temperature: float) -> Tensor:
        """`[B, S - 1, V]`: log-softmax of the logits that predict positions 1 to S - 1."""
        logits = self.model(input_ids=batch["input_ids"], attention_mask=_real(batch).long(), use_cache=False).logits
        return torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)

    def _logprobs(self, batch: Batch, temperature: float) -> Tensor:
        targets = batch["input_ids"][:, 1:].unsqueeze(-1)
        chosen = self._distributions(batch, temperature).gather(-1, targets).squeeze(-1)
        return torch.nn.functional.pad(chosen, (1, 0)) * _real(batch)

    # -- losses -------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, kind: str) -> Tensor:
        """`nll`: mean over all valid tokens. `pg`, `sequence_pg`: clipped policy gradient (ratios in 0.8 to 1.2), the
        mean over tokens, or over sequences of each sequence's mean. Valid: `token_mask` and `sample_mask`, position 0
        never.
        """
        mask: Tensor = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        if kind == "nll":
            return -(self._logprobs(batch, 1.0)[:, 1:] * mask).sum() / mask.sum()
        logprobs = self._logprobs(batch, self.temperature)[:, 1:]
        ratio = torch.exp(logprobs - batch["prev_logprobs"][:, 1:])
        advantages = batch["advantages"][:, 1:]
        terms: Tensor = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask
        if kind == "pg":
            return terms.sum() / mask.sum()
        if kind == "sequence_pg":
            means = terms.sum(1) / mask.sum(1).clamp(min=1.0)
            return means.sum() / float(batch["sample_mask"].sum())
        raise ValueError(f"there is no loss {kind!r}: nll, pg or sequence_pg")

    def router_loss(self, batch: Batch) -> Tensor:
        """Experts times the sum over them of share and chance: of each in all choices of all tokens, and on average.

        Over all blocks, and the tokens of rows that the losses are about.
        """
        real, counted = _real(batch), batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"] > 0
        logits = self.model(
            input_ids=batch["input_ids"], attention_mask=real.long(), use_cache=False, output_router_logits=True
        ).router_logits
        asked = (real * counted[:, None]).reshape(-1) > 0
        chances = torch.cat([torch.softmax(layer, -1)[asked] for layer in logits])
        choices = chances.topk(self.model.config.num_experts_per_tok, dim=-1).indices
        share = torch.zeros_like(chances).scatter(1, choices, 1.0).mean(0)
        return chances.shape[1] * (share * chances.mean(0)).sum()

    def gradients(self, batch: Batch, kind: str) -> dict[str, Tensor]:
        """The gradient of each parameter; none of them is changed."""
        self.model.zero_grad()
        self._whole_loss(batch, kind).backward()
        found = {name: _gradient(parameter).clone() for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return expert_by_expert(found)

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, kind: str, lr: float | None = None) -> OracleStep:
        """One AdamW step, at `lr` where it is given."""
        self.model.zero_grad()
        self._whole_loss(batch, kind).backward()
        with torch.no_grad():
            loss = self.loss(batch, kind).item()
        return self.descend(loss, lr)

    def _whole_loss(self, batch: Batch, kind: str) -> Tensor:
        """What is minimised: the loss, and that of the routers where it has a weight."""
        loss = self.loss(batch, kind)
        return loss + self.router_loss_coef * self.router_loss(batch) if self.router_loss_coef else loss

    def descend(self, loss: float, lr: float | None = None) -> OracleStep:
        """The step on the gradients that the parameters hold, which are of `loss`."""
        gradients = {name: _gradient(parameter).clone() for name, parameter in self.model.named_parameters()}
        norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum())
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for parameter in self.model.parameters():
                _gradient(parameter).mul_(self.max_grad_norm / norm)
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        self.optimizer.step()
        return OracleStep(loss, norm.item(), expert_by_expert(gradients))

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights by the names of `save_pretrained`; a tied head stands once."""
        return expert_by_expert({name: weight.detach().clone() for name, weight in self.model.named_parameters()})


def scores(path: Any, batch: Batch) -> Tensor:
    """`[B]`: what the reward model at `path` says at the last token of each row, each row by itself; no gradient."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    found = []
    with torch.no_grad():
        for ids, length in zip(batch["input_ids"], batch["input_lengths"].tolist(), strict=True):
            hidden = model.base_model(input_ids=ids[None, :length], use_cache=False).last_hidden_state
            found.append(model.score(hidden)[0, -1, 0])
    return torch.stack(found)


def expert_by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` by the names of `save_pretrained`, which has each expert of a mixture by itself."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for number, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                found |= {f"{experts}.{number}.gate_proj.weight": gate, f"{experts}.{number}.up_proj.weight": up}
        elif kind == "down_proj":
            found |= {f"{experts}.{number}.down_proj.weight": one for number, one in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _real(batch: Batch) -> Tensor:
    """`[B, S]`: 1 where there is a token, 0 at padding."""
    ids: Tensor = batch["input_ids"]
    lengths: Tensor = batch["input_lengths"]
    return (torch.arange(ids.shape[1]) < lengths[:, None]).float()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "the loss does not hang on this parameter"
    return parameter.grad
