"""The driver rejects these before a worker gets anything: shapes, types and values of a batch, by one error each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_vlms
import torch

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.loss import LossInput
from rlframework.policy.batch_checks import BatchLimits, check_groups, check_loss, detached, require_batch

LIMITS = BatchLimits(vocabulary=105, positions=6)
LOSS = ClippedPGLoss(ClippedPGLossConfig(kl_coef=0.1))
IDS = torch.tensor([[1, 2, 3, 0], [101, 102, 103, 104]])
MASK = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 1]])
VALUES = torch.tensor([[0.0, -1, 0.5, 0], [0, 1, 2, 3]])


def batch(**changes: Any) -> BatchedDataDict[Any]:
    """Two good rows, with `changes`; None removes a key."""
    data = {
        "input_ids": IDS,
        "input_lengths": torch.tensor([3, 4]),
        "token_mask": MASK,
        "sample_mask": torch.ones(2),
        "advantages": VALUES,
        "reference_policy_logprobs": VALUES,
        "name": ["a", "b"],
    } | changes
    return BatchedDataDict({key: value for key, value in data.items() if value is not None})


def check(data: BatchedDataDict[Any], limits: BatchLimits = LIMITS) -> None:
    require_batch("train", data)
    limits.check(data, check_loss(LOSS))


def at(row: int, column: int, value: float, values: torch.Tensor = VALUES) -> torch.Tensor:
    changed = values.clone()
    changed[row, column] = value
    return changed


SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "input_ids must be present"),
    ({"input_ids": IDS[0]}, "same number of rows"),
    ({"input_ids": IDS.tolist()}, "input_ids must be a tensor of integer token ids .* got a list"),
    ({"input_ids": IDS.float()}, "input_ids must be a tensor of integer"),
    ({"input_ids": IDS.to(torch.uint16)}, "the value of 'input_ids' is of torch.uint16; train takes bool, uint8"),
    ({"name": torch.ones(2).to(torch.uint64)}, "the value of 'name' is of torch.uint64"),
    ({"input_lengths": None}, "input_lengths must be present in the data; it has"),
    ({"input_lengths": torch.tensor([3.0, 4.0])}, "input_lengths must be integers"),
    ({"input_lengths": torch.tensor([[3], [4]])}, r"input_lengths must be a tensor of 2 lengths.*\[2, 1\]"),
    ({"token_mask": torch.ones(2)}, r"token_mask.*\[B, S\]"),
    ({"token_mask": torch.ones(2, 1)}, r"token_mask must have the shape \[2, 4\]"),
    ({"token_mask": MASK.to(torch.float8_e5m2)}, "the value of 'token_mask' is of torch.float8"),
    ({"sample_mask": torch.ones(2, 4)}, r"sample_mask.*\[B\]"),
    ({"sample_mask": torch.ones(3)}, "same number of rows .*'sample_mask': 3"),
    ({"other": torch.ones(2, 5)}, r"expected dim 1=4 .* 'other' is torch.float32 of shape \[2, 5\]"),
    ({"name": ["a"]}, "same number of rows .*'name': 1"),
    ({"name": "ab"}, "the value of 'name' is a str"),
    ({"name": torch.tensor(1)}, "0-dimensional"),
    ({"name": torch.ones(2, 4).to_sparse()}, "layout"),
    ({"name": torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged)}, "'name' is a nested tensor"),
    ({"name": torch.ones(2, device="meta")}, "'name' is a meta tensor"),
    ({"advantages": None}, "advantages must be present in the data, as the loss reads it; it has .*'token_mask'"),
    ({"advantages": VALUES[:, 0]}, r"advantages must be a tensor \[B, S\] = \[2, 4\] of floating.* \[2\]"),
    ({"advantages": VALUES[:, :1]}, r"advantages must be .* got torch.float32 of shape \[2, 1\]"),
    ({"advantages": VALUES.long()}, "advantages must be .*floating-point numbers, got torch.int64"),
    ({"advantages": VALUES.tolist()}, "advantages must be .* got a list"),
    ({"reference_policy_logprobs": None}, "reference_policy_logprobs must be present"),
    ({"prev_logprobs": VALUES.bool()}, "prev_logprobs must be .*floating"),
]

CONTENTS: list[tuple[dict[str, Any], str]] = [
    ({"input_lengths": torch.tensor([3, 5])}, r"input_lengths of row 1 is 5; allowed is 0\.\.4"),
    ({"input_lengths": torch.tensor([-1, 4])}, "input_lengths of row 0 is -1"),
    ({"input_lengths": torch.tensor([0, 0])}, "none of the 2 rows has a token"),
    ({"input_ids": at(1, 3, 105, IDS)}, r"row 1 has token 105 at position 3.*0 to 104"),
    ({"input_ids": at(0, 1, -2, IDS)}, "row 0 has token -2 at position 1"),
    ({"token_mask": at(0, 3, 1, MASK)}, "token_mask of row 0 is set at position 3, which is padding"),
    ({"token_mask": at(1, 2, math.nan, MASK)}, r"token_mask must be in 0\.\.1, but is nan in row 1 at position 2"),
    ({"token_mask": at(0, 1, -1, MASK)}, "token_mask must be .* is -1 in row 0 at position 1"),
    ({"token_mask": at(0, 1, 2, MASK).long()}, "token_mask must be .* is 2 in row 0 at position 1"),
    ({"sample_mask": torch.tensor([1, math.nan])}, "sample_mask must be in 0..1, but is nan in row 1$"),
    ({"sample_mask": torch.tensor([1, math.inf])}, "sample_mask must be"),
    ({"advantages": at(1, 0, math.nan)}, "advantages must be finite, in fp32, but is nan in row 1 at position 0"),
    ({"advantages": at(0, 3, -math.inf).bfloat16()}, "advantages must be .* is -inf in row 0 at position 3"),
    ({"advantages": at(0, 1, 1e300, VALUES.double())}, r"advantages must be .* is 1e\+300"),
    ({"prev_logprobs": at(0, 1, math.inf)}, "prev_logprobs must be finite"),
    ({"generation_logprobs": at(0, 1, math.nan)}, "generation_logprobs must be finite"),
    ({"pixels": PackedTensor([torch.ones(2, 3), torch.ones(2, 4)], 0)}, "the rows of pixels may differ in dimension 0"),
    (
        {"pixels": PackedTensor([torch.ones(2, 3), None], 0), "token_type_ids": torch.ones(2, 4)},
        r"token_type_ids must be integers \[2, 4\]",
    ),
]


def test_a_good_batch_is_accepted() -> None:
    check(batch())
    check(batch(input_lengths=torch.tensor([0, 4]), token_mask=at(0, 1, 0, at(0, 2, 0, MASK))))
    check(batch(other=torch.ones(2, 1), prev_logprobs=VALUES.half(), token_mask=MASK.bool(), weights=VALUES / 0))
    check(batch(input_ids=at(0, 3, -100, IDS)))  # padding may be anything


@pytest.mark.parametrize(("changes", "message"), SHAPES + CONTENTS)
def test_a_bad_batch_is_rejected_naming_key_and_row(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check(batch(**changes))


def test_rows_are_limited_by_the_positions_of_the_model() -> None:
    with pytest.raises(BatchError, match="input_lengths of row 1 is 4, but the model takes 3 tokens"):
        check(batch(), BatchLimits(positions=3))
    check(batch(), BatchLimits())


@pytest.mark.parametrize("data", [None, {"input_ids": IDS}, [IDS]])
def test_only_batches_are_taken(data: Any) -> None:
    with pytest.raises(BatchTypeError, match="train takes a BatchedDataDict, not a"):
        require_batch("train", data)


def test_a_batch_needs_rows() -> None:
    for empty in (BatchedDataDict(), batch().slice(0, 0)):
        with pytest.raises(BatchError, match="train got no rows"):
            require_batch("train", empty)


@pytest.mark.parametrize("loss", [None, NLLLoss, lambda *arguments: None, object()])
def test_only_losses_are_taken(loss: Any) -> None:
    with pytest.raises(BatchTypeError, match=r"loss_fn must be callable and have loss_type, .* got"):
        check_loss(loss)


@pytest.mark.parametrize("value", ["logprob", None, 3, LossInput])
@pytest.mark.parametrize(("name", "allowed"), [("input_type", "LOGPROBS, LOGITS"), ("loss_type", "TOKEN_LEVEL, SEQ")])
def test_a_loss_has_known_types(name: str, allowed: str, value: Any) -> None:
    loss = NLLLoss()
    setattr(loss, name, value)
    with pytest.raises(BatchTypeError, match=rf"NLLLoss\.{name} is .*; it must be one of {allowed}"):
        check_loss(loss)
    setattr(loss, name, str(getattr(NLLLoss, name)))  # the text of a member is equal to it
    check_loss(loss)


def test_a_loss_names_what_it_reads() -> None:
    assert not check_loss(NLLLoss())
    columns = check_loss(ClippedPGLoss(ClippedPGLossConfig()))
    assert {key: column.required for key, column in columns.items()} == {
        "advantages": True,
        "prev_logprobs": False,
        "generation_logprobs": False,
        "sequence_weights": False,
    }
    columns = check_loss(ClippedPGLoss(ClippedPGLossConfig(kl_coef=0.1, kl_correction="generator")))
    assert [key for key, column in columns.items() if column.required] == [
        "advantages",
        "generation_logprobs",
        "reference_policy_logprobs",
    ]


PROMPTS: list[tuple[dict[str, Any], type[BatchError], str]] = [
    ({"seeds": None}, BatchKeyError, r"needs input_ids, input_lengths and seeds; it got \['input_ids', 'input_leng"),
    ({"seeds": torch.ones(2)}, BatchTypeError, r"seeds must be a tensor \[B\] of integers, got torch.float32"),
    ({"seeds": torch.ones(2, 1).long()}, BatchTypeError, "seeds must be"),
    ({"input_lengths": torch.tensor([3, 0])}, BatchError, "input_lengths of row 1 is 0; a prompt may have 1 to 4"),
    ({"input_lengths": torch.tensor([3, 9])}, BatchError, "input_lengths of row 1 is 9"),
    ({"input_ids": at(0, 0, 105, IDS)}, BatchError, "row 0 has token 105"),
    ({"input_ids": IDS.float()}, BatchTypeError, "input_ids must be"),
    (
        {"input_lengths": torch.tensor([3, 4]).to(torch.uint32)},
        BatchTypeError,
        "the value of 'input_lengths' is of torch.uint32",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), PROMPTS)
def test_bad_prompts_are_rejected(changes: dict[str, Any], kind: type[BatchError], message: str) -> None:
    values = {"input_ids": IDS, "input_lengths": torch.tensor([3, 4]), "seeds": torch.arange(2)}
    LIMITS.check_prompts(BatchedDataDict(values))
    with pytest.raises(kind, match=message):
        LIMITS.check_prompts(
            BatchedDataDict({key: value for key, value in (values | changes).items() if value is not None})
        )


def test_a_prompt_leaves_a_position() -> None:
    prompts = BatchedDataDict({"input_ids": IDS, "input_lengths": torch.tensor([3, 4]), "seeds": torch.arange(2)})
    with pytest.raises(BatchError, match="row 1 is 4; a prompt may have 1 to 3, so that the model has a position left"):
        BatchLimits(positions=4).check_prompts(prompts)


@pytest.mark.slow
def test_the_limits_of_a_model_and_its_media(tiny_llama: Any, tmp_path: Any) -> None:
    limits = BatchLimits.of(PolicyConfig(model_name=str(tiny_llama)))
    assert (limits.vocabulary, limits.positions) == (len(load_tokenizer(str(tiny_llama))), 128)
    images = batch(pixels=PackedTensor([torch.ones(2, 3), None], 0))
    with pytest.raises(BatchError, match=r"pixels has media, but policy.model_name=.* is a model of text only"):
        check(images, BatchLimits(no_media=limits.no_media))
    check(batch(pixels=PackedTensor([None, None], 0)), BatchLimits(no_media=limits.no_media))

    def limits_of(kind: str, mode: str) -> BatchLimits:
        tiny_vlms.make_model(kind).config.save_pretrained(tmp_path)
        found = BatchLimits.of(PolicyConfig(model_name=str(tmp_path), batching={"mode": mode}))
        return BatchLimits(no_media=found.no_media, token_types=found.token_types)

    check(images, limits_of("llava", "auto"))
    check(images, limits_of("llava", "packed"))
    with pytest.raises(BatchError, match=r"packed takes text only for gemma3 models; set it to dynamic or padded"):
        check(images, limits_of("gemma3", "packed"))
    for kind, column in (("gemma3", "token_type_ids"), ("qwen2_vl", "mm_token_type_ids")):
        with pytest.raises(BatchError, match=f"rows with media need {column}"):
            check(images, limits_of(kind, "auto"))


def test_values_carry_no_gradients_to_the_loss() -> None:
    with torch.inference_mode():
        made = torch.ones(2, 4)
    data = detached(batch(advantages=VALUES.clone().requires_grad_() * 2, prev_logprobs=made))
    assert not data["advantages"].requires_grad
    assert not data["prev_logprobs"].is_inference()
    assert data["input_ids"].data_ptr() == IDS.data_ptr()


def in_groups(ids: Any) -> BatchedDataDict[Any]:
    column = {} if ids is None else {"group_ids": ids}
    return BatchedDataDict({"input_ids": torch.ones(6, 3, dtype=torch.int64), **column})


def test_whole_groups_are_accepted() -> None:
    check_groups(in_groups(torch.tensor([4, 2, 4, 9, 9, 1])), batch_size=3, ranks=2)


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        (torch.tensor([4, 2, 7, 4, 9, 1]), BatchError, r"group 4 has rows in the global batches \[0, 1\] of 3 rows"),
        (torch.tensor([4, 4, 4, 1, 2, 3]), BatchError, "3 rows has 1 groups for 2 data-parallel workers"),
        (torch.tensor([1.0] * 6), BatchTypeError, r"group_ids must be a tensor \[B\] = \[6\] of integers"),
        (torch.tensor([1] * 5), BatchTypeError, r"group_ids must be a tensor \[B\] = \[6\] of integers"),
        (None, BatchKeyError, r"group_ids must be present in the data, as the loss needs groups .* has \['input_ids'"),
    ],
)
def test_bad_groups_are_rejected(ids: Any, kind: type[BatchError], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_groups(in_groups(ids), batch_size=3, ranks=2)


def test_a_class_in_the_place_of_a_loss_is_asked_about():
    with pytest.raises(BatchError, match=r"got the class NLLLoss; did you mean NLLLoss\(\)\?$"):
        check_loss(NLLLoss)
