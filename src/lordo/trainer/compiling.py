"""Compiling with torch.compile: does it work here at all?"""

from __future__ import annotations

import torch

from lordo.trainer.config import RunConfig


def check_compiles(config: RunConfig, device: torch.device) -> None:
    """Compile something tiny with the backend that the model is to be compiled with, before anything large is tried.

    Raises:
        ValueError: it does not work on this machine: no C++ compiler, say, or no Triton for a GPU.
    """
    backend = config.model.compile
    if backend is None:
        return
    try:
        torch.compile(_tiny, backend=backend)(torch.ones(2, device=device))
    except Exception as error:  # whatever a lacking or broken compiler sets off in there
        told = " ".join(str(error).split("Set TORCHDYNAMO")[0].split())  # the rest says how to report a bug of torch
        raise ValueError(
            f"model.compile = {backend!r} does not work on this machine ({told[:200]}): install a C++ compiler (on a GPU: Triton), "
            "or leave model.compile out"
        ) from error


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
