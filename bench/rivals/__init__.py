"""Who is measured: one class per library, imported only in the process that measures it.

A class has a method for each operation it knows (see kinds.py), which takes the case and its arrays
and gives back a call without arguments, everything that is prepared once being prepared.
"""

from __future__ import annotations

from importlib import import_module

from bench.rivals.base import Prepared, Rival

__all__ = ["RIVALS", "Prepared", "Rival", "matching", "rival"]

RIVALS = {
    "qkv_ext": "own:Own",
    "NumPy": "numpy_formula:NumPyFormula",
    "torch": "torch_sdpa:Torch",
    "ORT": "onnx_runtime:Standard",
    "ORT contrib": "onnx_runtime:Contrib",
    "OpenVINO": "openvino_sdpa:OpenVINO",
    "JAX": "jax_sdpa:Jax",
}


def rival(name: str, threads: int) -> Rival:
    """The rival of that name; an ImportError where its library is not installed."""
    module, attribute = RIVALS[name].split(":")
    made: Rival = getattr(import_module(f"bench.rivals.{module}"), attribute)(threads)
    return made


def matching(text: str) -> list[str]:
    """The rivals of a comma-separated list, each part the beginning of a name; ours always."""
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    for part in parts:
        if not any(name.lower().startswith(part) for name in RIVALS):
            raise ValueError(f"--rivals is a list of {', '.join(RIVALS)}; got {part!r}")
    return [
        name
        for name in RIVALS
        if name == "qkv_ext" or not parts or any(name.lower().startswith(part) for part in parts)
    ]
