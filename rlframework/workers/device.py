"""Settings of torch for a worker's GPU, made before its model is built."""

from __future__ import annotations

from rlframework.workers.allocator import use_expandable_segments


def prepare_device(device: str, *, tf32: bool, cudnn_attention: bool, expandable_segments: bool = False) -> None:
    """Set up torch for `device`, such as "cuda:0"; does nothing on a CPU. The arguments are keys of `policy`.

    From torch 2.11 on, cuDNN is the first choice for attention on recent GPUs. It builds a plan for each new shape,
    reported as 0.44 s forward and 0.55 s backward (modelscope/FunASR#3704), and decoding has a new shape for each
    token; with fewer than 8 heads of keys and values it is reported to decode wrongly on B200 (pytorch/pytorch#193893).
    For training in few shapes on H100 it is reported to be 1.7 to 2.3 times as fast (huggingface/transformers#48163).
    """
    if not device.startswith("cuda"):
        return
    import torch

    if expandable_segments:
        use_expandable_segments()
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
