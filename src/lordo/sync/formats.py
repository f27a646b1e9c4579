"""How numbers are written for the wire: blocks of them with a scale of their own, so that one outlier costs one block its precision.

Encoding and decoding are elementwise, and only what was decoded from a payload reaches a weight: workers that decode the same bytes
hold the same bits, whatever their machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lordo.sync.wire import wire_dtype

WireFormat = Literal["float32", "bfloat16", "int8", "int4"]

# Elements that share a scale. Smaller blocks follow the numbers more closely and cost more scales: 64 is 1/17 of an int4 payload.
BLOCK_ELEMENTS = 64
SCALE_BYTES = 2  # bfloat16: float32's range, so that neither huge nor tiny blocks need a case of their own


class Format(ABC):
    """A way to write numbers as bytes, block by block.

    Attributes:
        block: numbers in a block. block_bytes: bytes a block takes, its scale included.
    """

    block: int
    block_bytes: int

    def num_blocks(self, numel: int) -> int:
        """Blocks of a tensor; blocks never reach over two tensors."""
        return -(-numel // self.block)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of a tensor of `numel` elements on the wire."""
        return self.num_blocks(numel) * self.block_bytes

    def blocks(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor as (blocks, block), the last block filled up with zeros."""
        flat = tensor.reshape(-1)
        return F.pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block)

    @abstractmethod
    def encode(self, blocks: Tensor) -> Tensor:
        """(blocks, block) numbers -> (blocks, block_bytes) bytes."""

    @abstractmethod
    def decode(self, payload: Tensor) -> Tensor:
        """(blocks, block_bytes) bytes -> (blocks, block) numbers, float32 or better."""


class Plain(Format):
    """Numbers of a floating-point type as they are, each its own block."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        """The type they travel in."""
        self.dtype = dtype
        self.block_bytes = dtype.itemsize

    def encode(self, blocks: Tensor) -> Tensor:
        """Round to the type; its bytes."""
        return blocks.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, payload: Tensor) -> Tensor:
        """Back, in float32 or better."""
        numbers = payload.clone(memory_format=torch.contiguous_format).view(
            self.dtype
        )  # a copy: inside a message, bytes need not lie where numbers of this type may
        return numbers.to(wire_dtype(self.dtype))


class Scaled(Format):
    """Whole numbers of 8 or 4 bits times a step of the block: x ≈ s·q, |q| <= 127 or 7, an error of at most s/2.

    A block with an entry that is not finite decodes to NaN throughout, as a plain average would spread it.
    """

    block = BLOCK_ELEMENTS

    def __init__(self, bits: Literal[8, 4]) -> None:
        """Bits of one number."""
        self.bits = bits
        self.block_bytes = self.block * bits // 8 + SCALE_BYTES

    @property
    def levels(self) -> int:
        """Steps from zero to a block's largest magnitude."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, blocks: Tensor) -> Tensor:
        """Bytes of the whole numbers, then of the step."""
        blocks = blocks.float()
        # half of bfloat16's precision is added, so that rounding the step does not cut the largest number off
        steps = (blocks.abs().amax(dim=1, keepdim=True) * ((1 + 2**-8) / self.levels)).to(torch.bfloat16)
        steps = steps.masked_fill(~steps.isfinite(), torch.nan)
        numbers = self.numbers(blocks / steps.float())  # 0/0 in a block of zeros
        return torch.cat([_packed(numbers.nan_to_num_(0.0).to(torch.uint8), self.bits), steps.view(torch.uint8)], dim=1)

    def decode(self, payload: Tensor) -> Tensor:
        """Numbers times the step, which float32 holds exactly."""
        steps = payload[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        return self.multiples(_unpacked(payload[:, :-SCALE_BYTES], self.bits).float()) * steps

    def numbers(self, multiples: Tensor) -> Tensor:
        """Multiples of the step as whole numbers from 0 on; the middle one stands for zero."""
        return multiples.round_().clamp_(-self.levels, self.levels).add_(self.levels + 1)

    def multiples(self, numbers: Tensor) -> Tensor:
        """The reverse of `numbers`, rounding aside."""
        return numbers.sub_(self.levels + 1)


class ScaledRoots(Scaled):
    """For second moments: their roots, √v ≈ s (q + ½), q = 0 … 2^bits − 1, so that nothing above zero becomes zero.

    Rounded to the nearest step, a small v next to a large one would become zero, and dividing by its root would throw the weight away.
    """

    @property
    def levels(self) -> int:
        """A root has no sign to spend a bit on."""
        return int(2**self.bits)

    def encode(self, blocks: Tensor) -> Tensor:
        """The roots in place of the numbers; what rounding left below zero counts as zero."""
        return super().encode(blocks.to(wire_dtype(blocks.dtype)).clamp(min=0).sqrt())

    def decode(self, payload: Tensor) -> Tensor:
        """Squares of the roots."""
        return super().decode(payload).square_()

    def numbers(self, multiples: Tensor) -> Tensor:
        """The step in which a root lies."""
        return multiples.floor_().clamp_(0, self.levels - 1)

    def multiples(self, numbers: Tensor) -> Tensor:
        """The middle of the step."""
        return numbers.add_(0.5)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Bytes of whole numbers 0 … 2^bits − 1: two to a byte if they have 4 bits."""
    return numbers if bits == 8 else numbers[:, 0::2] << 4 | numbers[:, 1::2]


def _unpacked(payload: Tensor, bits: int) -> Tensor:
    """The reverse of `_packed`."""
    return payload if bits == 8 else torch.stack([payload >> 4, payload & 15], dim=2).flatten(1)


_BITS: dict[str, Literal[8, 4]] = {"int8": 8, "int4": 4}
_FORMATS: dict[tuple[str, bool], Format] = {
    (name, roots): (ScaledRoots if roots else Scaled)(bits) for name, bits in _BITS.items() for roots in (False, True)
}
_BFLOAT16 = Plain(torch.bfloat16)
_PLAIN = {dtype: Plain(dtype) for dtype in (torch.float32, torch.float64)}


def find_format(name: WireFormat, dtype: torch.dtype, *, what: str) -> Format:
    """How a tensor travels.

    Args:
        name: "float32" (float64 for float64 tensors: nothing is rounded), "bfloat16", "int8" or "int4".
        dtype: the tensor's. what: "exp_avg_sq" travels as roots where it is quantised.
    """
    if name == "float32":
        return _PLAIN[wire_dtype(dtype)]
    return _BFLOAT16 if name == "bfloat16" else _FORMATS[name, what == "exp_avg_sq"]


def format_names(settings: Mapping[str, Any]) -> dict[str, WireFormat]:
    """The wire format of everything that can be sent; moments and basis follow the parameters unless set."""
    parameters = settings["sync_wire"]
    moments = settings["sync_wire_moments"] or parameters
    basis = settings["sync_wire_basis"] or ("float32" if parameters == "float32" else "bfloat16")
    return {"parameters": parameters, "error": parameters, "exp_avg": moments, "exp_avg_sq": moments, "basis": basis}
