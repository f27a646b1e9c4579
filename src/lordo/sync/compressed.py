"""A quantised all-reduce: every worker sums one share of the numbers, and only bytes in a wire format cross the link, twice.

    scatter   each worker encodes what it contributes and sends every other worker that worker's share
    gather    the owner of a share decodes, sums in float32, encodes the mean, and sends it to all
    finish    everybody, the owner too, decodes the same bytes

What encoding dropped is given back, to be added to the next contribution: of other workers' shares, what this worker's own encoding
dropped; of its own share (which it sums without encoding it) what encoding the mean dropped, M times, since a mean divides by M. So

    Σ over workers (contributed − residual) = M · mean,  exactly but for rounding

and nothing is lost for good (error feedback: Seide et al. 2014; both directions: Tang et al., DoubleSqueeze, arXiv 1905.05957).

A worker whose contribution is not finite says so in the first message and is left out by all, as in `shares.average_`. Every message ends
in a checksum. A damaged one is told to all workers before anything is written, and all stop with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lordo.finite import first_nonfinite
from lordo.shards import local
from lordo.sync.comm import Comm, WorkerError
from lordo.sync.formats import Format, WireFormat, find_format
from lordo.sync.shares import LeftOut
from lordo.sync.wire import CHECKSUM_BYTES, NOTE_BYTES, all_reduce_moves, broadcast_moves, reduce_moves

_USABLE = -1  # in a note, in place of the number of a tensor that is not finite


class DamagedPayloadError(WorkerError):
    """A message arrived with another checksum than it was sent with; nothing of it was used."""


@dataclass(frozen=True)
class Part:
    """A tensor in a quantised all-reduce.

    Attributes:
        tag: under which its bytes are counted. name: what it is called in messages. format: how it travels. numel: its elements.
        read: what this worker contributes; called once per stage, so that no copy of the model has to wait for the others.
        write: takes the mean (float32 or better, flat) when all has arrived.
        residual: takes what encoding dropped, in the tensor's own shape; None lets it go.
    """

    tag: str
    name: str
    format: Format
    numel: int
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    residual: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the tensor."""
        return self.format.num_blocks(self.numel)


class CompressedMean:
    """The mean of some tensors over the workers, in their wire formats; call `scatter`, `gather`, `finish` in this order.

    Other collectives may run in between, and the local steps of training: what is on its way needs no attention.
    """

    def __init__(self, comm: Comm, parts: Sequence[Part], device: torch.device) -> None:
        """The tensors, alike and in the same order on every worker; nothing is sent yet. Messages are made on `device`."""
        self.comm, self.device, self.verdict = comm, device, Verdict(comm, device)
        self.left_out: tuple[LeftOut, ...] = ()
        self.batches = [_Batch(comm, same, device) for same in _by_format(parts)]
        self.parts = parts
        self._arriving: Callable[[], list[Tensor]]

    def scatter(self, *, in_a_row: int = 0) -> None:
        """Send every worker its share of what this one contributes, and whether that is finite.

        Args:
            in_a_row: how often this worker was left out of an average just before.
        """
        for part in self.parts:
            _count(self.comm, part.tag, [all_reduce_moves(part.format.payload_bytes(part.numel))])
        _count(self.comm, "envelope", [broadcast_moves(self.comm.size * (NOTE_BYTES + 2 * CHECKSUM_BYTES))])
        with self.comm.timed("encoding"):
            found = next((i for i, part in enumerate(self.parts) if first_nonfinite([("", part.read())]) is not None), None)
            found = self.comm.inside.first(found, device=self.device)
            unusable = _USABLE if found is None else found
            note = torch.tensor([unusable, in_a_row], dtype=torch.int32, device=self.device).view(torch.uint8)
            for batch in self.batches:
                batch.encode_contributions()
            shares = [[batch.share_of(worker) for batch in self.batches] for worker in range(self.comm.size)]
            messages = [sealed([note, *share], self.device) for share in shares]
        own = messages[self.comm.rank].numel()
        self._arriving = self.comm.exchange(messages, [own] * self.comm.size)

    def gather(self) -> None:
        """Sum this worker's own share, and send the mean to all."""
        messages = self._arriving()
        with self.comm.timed("encoding"):
            opened = self.verdict.opened(messages, [NOTE_BYTES, *(batch.share_bytes(self.comm.rank) for batch in self.batches)])
            self.left_out = self._left_out([note for note, *_ in opened])
            for i, batch in enumerate(self.batches, start=1):
                batch.encode_mean([share[i] for share in opened], self._included())
            message = sealed([batch.mean for batch in self.batches], self.device)
        sizes = [CHECKSUM_BYTES + sum(batch.share_bytes(worker) for batch in self.batches) for worker in range(self.comm.size)]
        self._arriving = self.comm.exchange([message] * self.comm.size, sizes)

    def finish(self) -> None:
        """Write the mean, and what was dropped.

        Raises:
            DamagedPayloadError: on all workers, if a message to any of them was damaged; nothing was written.
        """
        messages = self._arriving()
        with self.comm.timed("encoding"):
            means = [
                self.verdict.opened([message], [batch.share_bytes(worker) for batch in self.batches], source=worker)[0]
                for worker, message in enumerate(messages)
            ]
        self.verdict.check()
        with self.comm.timed("encoding"):
            for i, batch in enumerate(self.batches):
                batch.write([mean[i] for mean in means], included=self.comm.rank in self._included())

    @property
    def is_ruined(self) -> bool:
        """Whether this worker was left out: what it has cannot be corrected by the mean, only replaced."""
        return self.comm.rank not in self._included()

    def _included(self) -> list[int]:
        """Whose shares count: those that are finite, or all if nobody's are."""
        left_out = {each.worker for each in self.left_out}
        return [worker for worker in range(self.comm.size) if worker not in left_out] or list(range(self.comm.size))

    def _left_out(self, notes: Sequence[Tensor]) -> tuple[LeftOut, ...]:
        numbers = [note.clone().view(torch.int32).tolist() for note in notes]
        sound = [worker for worker in range(self.comm.size) if worker not in self.verdict.damaged]
        return tuple(
            LeftOut(worker, self.parts[unusable].name, before + 1)
            for worker, (unusable, before) in enumerate(numbers)
            if worker in sound and unusable != _USABLE
        )


class _Batch:
    """The parts of one format: their blocks lie one after another, and worker j owns the j-th of M even shares of them."""

    def __init__(self, comm: Comm, parts: Sequence[Part], device: torch.device) -> None:
        self.comm, self.parts, self.format, self.device = comm, parts, parts[0].format, device
        ends = torch.tensor([0, *(part.num_blocks for part in parts)]).cumsum(0).tolist()
        self.spans = list(pairwise(ends))
        self.total = ends[-1]
        self.sent: Tensor  # (blocks, bytes), what this worker contributes
        self.mean: Tensor  # (blocks of its own share, bytes)
        self.dropped: Tensor  # (blocks of its own share, block)

    def share(self, worker: int) -> tuple[int, int]:
        """First block of a worker's share, and the one after its last."""
        return self.total * worker // self.comm.size, self.total * (worker + 1) // self.comm.size

    def share_bytes(self, worker: int) -> int:
        start, end = self.share(worker)
        return (end - start) * self.format.block_bytes

    def share_of(self, worker: int) -> Tensor:
        """What goes to a worker."""
        start, end = self.share(worker)
        return self.sent[start:end]

    def _blocks(self, part: Part) -> Tensor:
        return self.format.blocks(part.read().to(self.device))

    def encode_contributions(self) -> None:
        self.sent = torch.cat([self.format.encode(self._blocks(part)) for part in self.parts])

    def encode_mean(self, shares: Sequence[Tensor], included: Sequence[int]) -> None:
        """Sum in order of rank over the workers that are included, this worker's own contribution as it is."""
        own = self._own_blocks()
        total = torch.zeros_like(own)
        for worker in included:
            total += own if worker == self.comm.rank else self.format.decode(shares[worker].view(-1, self.format.block_bytes))
        total /= len(included)
        self.mean = self.format.encode(total)
        self.dropped = (total - self.format.decode(self.mean)).mul_(len(included))

    def _own_blocks(self) -> Tensor:
        """This worker's own contribution to its own share, (blocks, block), in float32 or better."""
        start, end = self.share(self.comm.rank)
        found = []
        for part, (first, last) in zip(self.parts, self.spans, strict=True):
            low, high = max(first, start), min(last, end)
            if low < high:
                blocks = self._blocks(part)
                found.append(blocks[low - first : high - first].to(torch.promote_types(blocks.dtype, torch.float32)))
        like = self.format.decode(self.sent[:0])
        return torch.cat([like, *found]).to(like.dtype)

    def write(self, means: Sequence[Tensor], *, included: bool) -> None:
        """Decode what arrived of all shares, part by part."""
        arrived = torch.cat([mean.view(-1, self.format.block_bytes) for mean in means])
        start, end = self.share(self.comm.rank)
        for part, (first, last) in zip(self.parts, self.spans, strict=True):
            if part.residual is not None:
                sent = self.format.decode(self.sent[first:last])
                dropped = self._blocks(part) - sent if included else torch.zeros_like(sent)
                low, high = max(first, start), min(last, end)
                if low < high:
                    dropped[low - first : high - first] = self.dropped[low - start : high - start]
                dropped.nan_to_num_(0.0, 0.0, 0.0)
                part.residual.copy_(dropped.view(-1)[: part.numel].view_as(part.residual))
            part.write(self.format.decode(arrived[first:last]).view(-1)[: part.numel])


def _by_format(parts: Sequence[Part]) -> list[list[Part]]:
    together: dict[Format, list[Part]] = {}
    for part in parts:
        together.setdefault(part.format, []).append(part)
    return list(together.values())


# ---- from all to one, and from one to all


def means_at_owners(
    comm: Comm, tensors: Sequence[Tensor], read: Callable[[Tensor], Tensor], owners: Sequence[int], wire: WireFormat, *, tag: str
) -> Iterator[tuple[int, Tensor]]:
    """The means over the workers of some tensors, each at the worker that owns it.

    Args:
        tensors, read: `read(tensor)`, of the shape of this device's part of it, is what this worker contributes.
        owners: of each tensor. wire: the format.

    Yields:
        (number, mean) of the tensors that this worker owns; the mean is in float32 or better.
    """
    formats = [find_format(wire, t.dtype, what=tag) for t in tensors]
    device, sizes = tensors[0].device, [f.payload_bytes(local(t.detach()).numel()) for f, t in zip(formats, tensors, strict=True)]
    mine = {worker: [i for i, owner in enumerate(owners) if owner == worker] for worker in range(comm.size)}
    with comm.timed("encoding"):
        payloads = [f.encode(f.blocks(read(t))) for f, t in zip(formats, tensors, strict=True)]
        messages = [sealed([payloads[i] for i in mine[worker]], device) for worker in range(comm.size)]
    _count(comm, tag, [reduce_moves(size) for size in sizes])
    _count(comm, "envelope", [broadcast_moves(comm.size * CHECKSUM_BYTES)])
    arrived = comm.exchange(messages, [messages[comm.rank].numel()] * comm.size)()
    verdict, own = Verdict(comm, device), mine[comm.rank]
    with comm.timed("encoding"):
        received = verdict.opened(arrived, [sizes[i] for i in own])
    verdict.check()
    for place, i in enumerate(own):
        with comm.timed("encoding"):
            total = read(tensors[i]).to(torch.promote_types(tensors[i].dtype, torch.float32))
            for worker in range(comm.size):
                if worker != comm.rank:
                    decoded = formats[i].decode(received[worker][place].view(-1, formats[i].block_bytes))
                    total += decoded.view(-1)[: total.numel()].view_as(total)
        yield i, total / comm.size


def share_encoded_(comm: Comm, tensors: Sequence[Tensor], owners: Sequence[int], wire: WireFormat, *, tag: str) -> None:
    """Overwrite tensors by those of the workers that own them, as they arrive in a wire format: on the owner too.

    All owners send at once: over a link with latency, one after another would take that many times as long.

    Raises:
        DamagedPayloadError: on all workers, if a message to any of them was damaged.
    """
    if comm.size == 1:
        return
    formats = [find_format(wire, t.dtype, what=tag) for t in tensors]
    sizes = [f.payload_bytes(t.numel()) for f, t in zip(formats, tensors, strict=True)]
    owned = {worker: [i for i, owner in enumerate(owners) if owner == worker] for worker in range(comm.size)}
    _count(comm, tag, [broadcast_moves(size) for size in sizes])
    _count(comm, "envelope", [broadcast_moves(CHECKSUM_BYTES) for mine in owned.values() if mine])
    verdict = Verdict(comm, tensors[0].device)
    with comm.timed("encoding"):
        mine = [formats[i].encode(formats[i].blocks(tensors[i])) for i in owned[comm.rank]]
        message = sealed(mine, verdict.device) if mine else torch.empty(0, dtype=torch.uint8, device=verdict.device)
    lengths = [sum(sizes[i] for i in those) + CHECKSUM_BYTES if those else 0 for those in owned.values()]
    arrived = comm.exchange([message] * comm.size, lengths)()
    with comm.timed("encoding"):
        for worker, those in owned.items():
            if those:
                payloads = verdict.opened([arrived[worker]], [sizes[i] for i in those], source=worker)[0]
                for i, payload in zip(those, payloads, strict=True):
                    decoded = formats[i].decode(payload.view(-1, formats[i].block_bytes))
                    tensors[i].copy_(decoded.view(-1)[: tensors[i].numel()].view_as(tensors[i]))
    verdict.check()


def _count(comm: Comm, tag: str, moves: Sequence[int]) -> None:
    """Count what a collective moves; a worker that is alone sends nothing."""
    if comm.size > 1:
        comm.moved[tag] += sum(moves)


# ---- messages and their checksums


def sealed(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pieces of bytes as one message, its checksum at the end."""
    body = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(piece.reshape(-1) for piece in pieces)])
    return torch.cat([body, checksum(body)])


def checksum(body: Tensor) -> Tensor:
    """Eight bytes: the sum of its words of 32 bits, each times an odd number that goes with its place, in whole numbers modulo 2^64.

    One or two flipped bits always change it: words half as wide as the sum leave no bit whose weight two places share.
    """
    words = torch.cat([body, body.new_zeros(-body.numel() % 4)]).view(torch.int32)
    odd = torch.arange(1, 2 * words.numel() + 1, 2, device=words.device).mul_(_MIXER)
    return ((words * odd).sum() + body.numel()).view(1).view(torch.uint8)


_MIXER = -7046029254386353131  # 2^64 over the golden ratio, odd: spreads the places over all bits


class Verdict:
    """Whether every message of every worker arrived whole."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        """Nothing was damaged so far."""
        self.comm, self.device = comm, device
        self.damaged: set[int] = set()

    def opened(self, messages: Sequence[Tensor], sizes: Sequence[int], *, source: int = 0) -> list[list[Tensor]]:
        """The pieces of each message, the first one being of worker `source`; damaged ones are remembered.

        Args:
            messages: sealed, each of the same sizes. sizes: bytes of the pieces.
        """
        for worker, message in enumerate(messages, start=source):
            body, seal = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:]
            if not torch.equal(checksum(body), seal):
                self.damaged.add(worker)
        return [list(torch.split(message[:-CHECKSUM_BYTES], list(sizes))) for message in messages]

    def check(self) -> None:
        """Agree with the other workers.

        Raises:
            DamagedPayloadError: the same sentence on all of them.
        """
        seen = torch.tensor([worker in self.damaged for worker in range(self.comm.size)], dtype=torch.uint8, device=self.device)
        # straight from each to each: a sum would go around a ring, 2 (M - 1) times the latency of the link
        told = torch.stack(self.comm.exchange([seen] * self.comm.size, [self.comm.size] * self.comm.size)())
        with self.comm.transfer():
            anywhere = self.comm.inside.any(told.amax(0).int())
        guilty = ", ".join(str(worker) for worker in anywhere.nonzero().flatten().tolist())
        if guilty:
            raise DamagedPayloadError(
                f"what worker {guilty} sent arrived damaged (checksum): nothing of it was used; check memory and network of that machine "
                "and go on from the last checkpoint"
            )
