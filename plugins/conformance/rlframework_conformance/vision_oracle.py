"""The oracle for rows with images: each row by itself with its own images, unpadded.

Like `oracle`, it imports nothing of rlframework except that module (enforced by import-linter).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework_conformance.oracle import Batch, Oracle


class VisionOracle(Oracle):
    """An `Oracle` of a vision-language model.

    A batch has `pixel_values` and, for some models, `image_grid_thw`, with one tensor or None for each row in their
    `tensors`, and then `mm_token_type_ids [B, S]`.
    """

    auto_class = "AutoModelForImageTextToText"

    def _logits(self, batch: Batch) -> Tensor:
        rows = []
        longest = batch["input_ids"].shape[1]
        for row, length in enumerate(batch["input_lengths"].tolist()):
            inputs: dict[str, Any] = {}
            for name in ("pixel_values", "image_grid_thw"):
                if name in batch and batch[name].tensors[row] is not None:
                    inputs[name] = batch[name].tensors[row]
            if "mm_token_type_ids" in batch:
                inputs["mm_token_type_ids"] = batch["mm_token_type_ids"][row : row + 1, :length]
            logits = self.model(input_ids=batch["input_ids"][row : row + 1, :length], use_cache=False, **inputs).logits
            rows.append(torch.nn.functional.pad(logits[0], (0, 0, 0, longest - length)))
        return torch.stack(rows)
