"""Cutting a matrix by columns: what one number per column rules can be done block by block, with small temporaries."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Elements handled at once where a weight or its error is not held in the dtype of the computation. On a CPU a block stays in the
# cache; elsewhere a block must be large enough to be worth the launch of a kernel.
CPU_ELEMENTS = 1 << 18
OTHER_ELEMENTS = 1 << 24


def column_blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices that cover the n columns of an (m, n) matrix, each of about as many elements as are handled at once."""
    m, n = matrix.shape[-2:]
    width = max(1, (CPU_ELEMENTS if matrix.device.type == "cpu" else OTHER_ELEMENTS) // m)
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))
