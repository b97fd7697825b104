"""The generation engine `vllm`: vLLM in a process of its own, with weights from rlframework's transports."""

__version__ = "0.2.0"
