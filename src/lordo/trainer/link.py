"""What a link costs in seconds: what a run waits for, what passes while it computes, and what encoding saves or costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from lordo.accounting import Weight, traffic
from lordo.methods import Method
from lordo.sync.formats import WireFormat, find_format

# Numbers on which encoding is timed: as many as a large matrix has.
TIMED_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Load:
    """What one worker sends in a run, by whether it waits for it.

    Attributes:
        waited_for: bytes of gradients, bases, and of the average at the end; of everything without overlap.
        on_the_way: bytes of averages that steps of training pass over.
        covered_steps: steps of training, in the whole run, during which some average may be on its way.
    """

    waited_for: int
    on_the_way: int
    covered_steps: int

    def waiting_seconds(self, bits_per_second: float, step_seconds: float) -> float:
        """Seconds of the run spent waiting for the link, without latency.

        What is on its way costs only what is left of it after `covered_steps` steps of computing: with averages on their way all
        the time, a run takes as long as the larger of computing and sending.
        """
        left = self.on_the_way * 8 / bits_per_second - self.covered_steps * step_seconds
        return self.waited_for * 8 / bits_per_second + max(left, 0.0)


def load_of(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, steps: int, num_workers: int) -> Load:
    """What a run with a final average sends; arguments as of `accounting.traffic`."""
    sent = traffic(method, weights, settings, steps=steps, num_workers=num_workers, final_average=True)
    overlap = settings["sync_overlap"] if method.averages else 0
    if not overlap:
        return Load(waited_for=sent.total(), on_the_way=0, covered_steps=0)
    without_last = traffic(method, weights, settings, steps=steps, num_workers=num_workers)
    waited_for = sent.total() - without_last.total() + without_last["basis"] + without_last["first gradient"]
    every = settings["sync_every"]
    covered = min(settings["sync_fragments"] * overlap, every) * (steps // every)
    return Load(waited_for=waited_for, on_the_way=sent.total() - waited_for, covered_steps=covered)


def encoding_seconds(wire: WireFormat, num_workers: int, *, elements: int = TIMED_ELEMENTS, repeats: int = 3) -> float:
    """Seconds per number that a quantised average costs a worker, measured here and now with torch's threads.

    It encodes all numbers and decodes all of them again; of its own share it decodes those of M−1 others, and encodes the mean.
    """
    numbers = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    format = find_format(wire, numbers.dtype, what="parameters")
    blocks = format.blocks(numbers)
    payload = format.encode(blocks)
    encode, decode = (_fastest(lambda: format.encode(blocks), repeats), _fastest(lambda: format.decode(payload), repeats))
    share = 1 / num_workers
    return ((1 + share) * encode + (1 + (num_workers - 1) * share) * decode) / elements


def _fastest(work: Any, repeats: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


@dataclass(frozen=True)
class BreakEven:
    """What a wire format saves and costs in one average of the parameters.

    Attributes:
        wire: the format. sent: bytes per worker. saved: fewer than float32. seconds: of encoding and decoding, measured here.
    """

    wire: WireFormat
    sent: int
    saved: int
    seconds: float

    @property
    def bits_per_second(self) -> float:
        """The link below which the format saves more time than it costs."""
        return self.saved * 8 / self.seconds


def break_even(method: Method, weights: Sequence[Weight], settings: Mapping[str, Any], *, num_workers: int) -> list[BreakEven]:
    """Every format but float32 for a method's average of parameters and moments together, alone and waited for."""

    def sent(wire: WireFormat) -> int:
        plain = {"sync_wire": wire, "sync_wire_moments": None, "sync_split": False, "sync_overlap": 0, "sync_fragments": 1}
        every = dict.fromkeys(("sync_every", "sync_exp_avg_every", "sync_exp_avg_sq_every"), 1)
        by_tag = traffic(method, weights, {**settings, **every, **plain}, steps=1, num_workers=num_workers)
        return sum(by_tag[tag] for tag in ("parameters", "exp_avg", "exp_avg_sq", "envelope"))

    in_full = sent("float32")
    elements = in_full / 8 / ((num_workers - 1) / num_workers)  # 2 (M−1)/M · 4 bytes each
    rows = []
    for wire in get_args(WireFormat)[1:]:
        seconds = elements * encoding_seconds(wire, num_workers)
        rows.append(BreakEven(wire, sent(wire), in_full - sent(wire), seconds))
    return rows
