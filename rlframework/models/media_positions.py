"""Positions of the tokens of a packed row with images, where a model numbers patches by time, height and width.

Such positions (M-RoPE, Wang et al. 2024, arXiv:2409.12191) depend on the images of a sequence, so each sequence of a
packed row has its own. The model computes them itself for padded rows. Other kinds number all tokens one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlframework.batch.batch_rows import copy_to
from rlframework.interfaces.data_processor import Microbatch

GRIDS = ("image_grid_thw", "video_grid_thw")
TYPES = "mm_token_type_ids"


def packed_positions(model: Any, microbatch: Microbatch) -> Tensor:
    """Return the positions of the packed row of `microbatch`: `[1, L]`, or `[3, 1, L]` with patches numbered in 3-D.

    They are computed in CPU memory, so that nothing waits for the device.
    """
    inputs = (microbatch.host or microbatch).processed_inputs
    position_ids = microbatch.processed_inputs.position_ids
    assert position_ids is not None
    numbering = getattr(getattr(getattr(model, "module", model), "model", None), "get_rope_index", None)
    grids = {name: inputs.vlm_kwargs[name] for name in GRIDS if name in inputs.vlm_kwargs}
    if numbering is None or not grids:
        return position_ids
    assert microbatch.cu_seqlens is not None
    sizes = microbatch.cu_seqlens.diff().tolist()
    ids, types = (pad_sequence(row[0].split(sizes), True) for row in (inputs.input_ids, inputs.vlm_kwargs[TYPES]))
    real = torch.arange(ids.shape[1]) < torch.tensor(sizes)[:, None]
    positions, _ = numbering(ids, types, attention_mask=real, **grids)
    return copy_to(positions[:, real][:, None], position_ids.device)
