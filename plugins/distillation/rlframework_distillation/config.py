"""The section of distillation: `algorithm: {name: distillation, ...}`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlframework.config.algorithms import ClippedPGLossConfig, TrainOn
from rlframework.config.base import OwnPath, Section
from rlframework.config.endpoint import TeacherEndpointConfig
from rlframework.config.numbers import Coefficient, Count, Fraction, Limit, Tokens
from rlframework.config.sections import AlgorithmConfig


class DistillationLossConfig(Section):
    """The divergence of the student's distribution of a token from the teacher's, over some outcomes.

    With the probabilities p of the teacher and q of the student, `forward_kl` is KL(p || q) and `reverse_kl` is
    KL(q || p). `jsd` is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (arXiv:2306.13649,
    eq. 1), and at its ends, where that is 0, the limits that it has after division by beta or 1 - beta: beta 0 is
    `forward_kl`, beta 1 is `reverse_kl`. `mixed` is (1 - beta) KL(p || q) + beta KL(q || p).
    """

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "mixed"] = Field(
        "reverse_kl",
        description="forward_kl: of the teacher from the student; reverse_kl: of the student from the teacher; jsd: "
        "generalized Jensen-Shannon divergence (arXiv:2306.13649); mixed: weighted sum of both KL divergences",
    )
    beta: Fraction = Field(0.5, description="of jsd and mixed: 0 is forward_kl, and 1 is reverse_kl")
    rest: Literal["outcome", "renormalize", "omit"] = Field(
        "outcome",
        description="what becomes of the probability outside the top_k tokens. outcome: it counts as one more outcome; "
        "renormalize: both distributions are those among the top_k tokens; omit: no term for it (forward_kl only)",
    )
    sft_weight: Coefficient = Field(
        0.0, description="weight of the SFT term, the mean over tokens of completions in the data; 0: off"
    )

    @model_validator(mode="after")
    def _omit_forward(self) -> Self:
        if self.rest == "omit" and self.divergence != "forward_kl":
            raise ValueError(
                f"rest=omit with divergence={self.divergence} is least where the student has no probability on these "
                "tokens at all; set rest=outcome or renormalize, or divergence=forward_kl"
            )
        return self


class DistillationConfig(AlgorithmConfig):
    """Distillation of a teacher into the policy, on the policy's own completions or on those of the data."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "trl": {"tokens": "all", "student_fraction": 0.5, "mixing": "batches", "loss": {"divergence": "jsd"}},
        "verl": {"tokens": "sampled", "estimator": "k3", "reward_max": 10.0},
        "nemo_rl": {"tokens": "teacher_top_k", "top_k": 64, "loss": {"divergence": "mixed", "rest": "renormalize"}},
    }
    """The values of keys that each preset has in place of the defaults."""

    name: Literal["distillation"] | OwnPath = Field("distillation", description="distillation of a teacher")
    preset: Literal["trl", "verl", "nemo_rl"] | None = Field(
        None, description="whose defaults to use; keys that are set take precedence"
    )
    tokens: Literal["teacher_top_k", "student_top_k", "all", "sampled"] = Field(
        "teacher_top_k",
        description="tokens of the vocabulary that are compared at each position: the teacher's or the student's top_k "
        "most likely ones, all, or only the sampled one, with a policy gradient",
    )
    top_k: Count = Field(64, description="number of tokens per position for teacher_top_k and student_top_k")
    student_fraction: Fraction = Field(
        1.0, description="fraction of completions that the student generates; the others are those of the data"
    )
    mixing: Literal["rows", "batches"] = Field(
        "rows",
        description="rows: this fraction of each batch, rounded so that it is right over several steps; batches: each "
        "batch is the student's with this probability, or the data's (arXiv:2306.13649)",
    )
    loss: DistillationLossConfig = DistillationLossConfig()
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description="for sampled tokens: estimate of the KL divergence of the student from the teacher; its negative "
        "is the reward of a token. k1 is the log-ratio, with which the policy gradient is that of the divergence",
    )
    reward_max: Limit | None = Field(None, description="for sampled tokens: bound on the absolute reward; null: none")
    policy_gradient: ClippedPGLossConfig = Field(
        ClippedPGLossConfig(), description="for sampled tokens: settings of the policy-gradient loss"
    )
    train_on: TrainOn = Field(
        "last", description="tokens of data to train on: the last or every assistant turn, or all"
    )
    max_tokens: Tokens | None = Field(
        None, description="truncate longer rows of data at the end; null: a row longer than the limit is an error"
    )
    teacher_data: Path | None = Field(
        None, description="folder of rows with the teacher's log-probabilities, instead of a teacher; see the page"
    )
    endpoint: TeacherEndpointConfig | None = Field(None, description="teacher behind an endpoint; null: `teacher`")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = cls.presets.get(str(values.get("preset")), {})
        merged = {**defaults, **values}
        if isinstance(values.get("loss"), dict):
            merged["loss"] = {**defaults.get("loss", {}), **values["loss"]}
        return merged

    @property
    def uses_teacher_section(self) -> bool:
        """Whether the teacher is the policy of the section `teacher`."""
        return self.teacher_data is None and self.endpoint is None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.tokens == "sampled" and (self.loss.divergence != "reverse_kl" or self.student_fraction < 1.0):
            raise ValueError(
                "tokens=sampled estimates the reverse KL divergence from tokens of the student; set "
                "loss.divergence=reverse_kl and student_fraction=1"
            )
        if self.loss.sft_weight and self.student_fraction == 1.0:
            raise ValueError("loss.sft_weight is for completions of the data, but student_fraction=1; lower it")
        if self.teacher_data is not None and (self.student_fraction or self.tokens != "teacher_top_k"):
            raise ValueError(
                "teacher_data has the teacher's top_k tokens for rows of data; set student_fraction=0 and "
                "tokens=teacher_top_k"
            )
        if self.teacher_data is not None and self.endpoint is not None:
            raise ValueError("teacher_data and endpoint are both a teacher; set only one")
        if self.endpoint is not None and self.tokens in ("student_top_k", "all"):
            raise ValueError(
                f"tokens={self.tokens} needs log-probabilities of given tokens, which an endpoint does not return; set "
                "tokens=teacher_top_k or sampled, or give the section `teacher`"
            )
        return self
