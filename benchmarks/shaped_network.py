"""Network namespaces of one machine, joined by links that are as slow as asked for.

Without delay: a veth pair from every namespace to a bridge, shaped at both ends by tc's tbf qdisc. With delay: the kernel's own (netem) is
missing on many machines, so a process of ours carries the packets: it reads what a namespace sends into a TUN device, keeps every packet
for the delay, and writes it into the TUN device of the namespace that it is for, no faster than the link.
"""

import ctypes
import fcntl
import heapq
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MTU = 9000  # jumbo frames: headers are 1 % of the bytes, not 5 %
DEVICE = "eth0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def sh(command: str, *, check: bool = True) -> str:
    """Run one command; its output."""
    return subprocess.run(command.split(), check=check, capture_output=True, text=True).stdout


def address(worker: int) -> str:
    """Of a worker's end of the link."""
    return f"10.77.0.{worker + 1}"


def bytes_out(name: str) -> int:
    """What the interface of a namespace has sent so far."""
    return int(sh(f"ip netns exec {name} cat /sys/class/net/{DEVICE}/statistics/tx_bytes"))


@contextmanager
def namespaces(count: int, mbps: float, delay_ms: float = 0.0) -> Iterator[list[str]]:
    """Names of namespaces that reach each other at this rate and one-way delay; gone at the end, whatever happens."""
    hub, names = f"lordo-{os.getpid()}-hub", [f"lordo-{os.getpid()}-{worker}" for worker in range(count)]
    carrier = None
    try:
        for name in (hub, *names):
            sh(f"ip netns add {name}")
        if delay_ms:
            carrier = _start_carrier(names, mbps, delay_ms)
        else:
            _bridge(hub, names, mbps)
        for worker, name in enumerate(names):
            sh(f"ip -n {name} addr add {address(worker)}/24 dev {DEVICE}")
            for device in ("lo", DEVICE):
                sh(f"ip -n {name} link set {device} up")
            _shape(name, DEVICE, mbps)
        yield names
    finally:
        if carrier is not None:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
        for name in (*names, hub):
            sh(f"ip netns del {name}", check=False)


def _shape(name: str, device: str, mbps: float) -> None:
    """Let a device send no faster than this."""
    burst = max(int(mbps * 1e6 / 8 * 0.005), 2 * MTU)  # five milliseconds of the link, and never less than two packets
    sh(f"tc -n {name} qdisc add dev {device} root tbf rate {mbps}mbit burst {burst} latency 200ms")


def _bridge(hub: str, names: Sequence[str], mbps: float) -> None:
    """A pair of devices from each namespace to a bridge, whose ports are shaped: nobody receives faster than the link."""
    sh(f"ip -n {hub} link add bridge type bridge")
    sh(f"ip -n {hub} link set bridge up")
    for worker, name in enumerate(names):
        sh(f"ip -n {hub} link add port{worker} mtu {MTU} type veth peer name {DEVICE} mtu {MTU} netns {name}")
        sh(f"ip -n {hub} link set port{worker} master bridge up")
        _shape(hub, f"port{worker}", mbps)


def _start_carrier(names: Sequence[str], mbps: float, delay_ms: float) -> int:
    """A process that carries packets between TUN devices; its number."""
    ends = [_tun(name) for name in names]
    child = os.fork()
    if child:
        for end in ends:
            os.close(end)
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its namespaces
        _carry(ends, mbps * 1e6 / 8, delay_ms / 1000)
    finally:
        os._exit(1)


def _tun(name: str) -> int:
    """Open a new TUN device in a namespace: what is sent into the device is read from the file, and the other way round."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {name}")
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(there)
        os.close(home)
    sh(f"ip -n {name} link set {DEVICE} mtu {MTU}")
    return end


def _carry(ends: Sequence[int], bytes_per_second: float, delay_seconds: float) -> None:
    """Deliver every IPv4 packet after the delay, to each worker one after another at the rate of the link."""
    on_its_way: list[tuple[float, int, int, bytes]] = []  # when, number, to whom, what
    free_at = [0.0] * len(ends)
    number = 0
    while True:
        patience = max(0.0, on_its_way[0][0] - time.monotonic()) if on_its_way else None
        for end in select.select(ends, [], [], patience)[0]:
            packet = os.read(end, MTU)
            worker = packet[19] - 1  # the last byte of its destination; see `address`
            if packet[0] >> 4 != 4 or not 0 <= worker < len(ends):
                continue
            number += 1
            free_at[worker] = max(time.monotonic() + delay_seconds, free_at[worker] + len(packet) / bytes_per_second)
            heapq.heappush(on_its_way, (free_at[worker], number, worker, packet))
        while on_its_way and on_its_way[0][0] <= time.monotonic():
            _, _, worker, packet = heapq.heappop(on_its_way)
            os.write(ends[worker], packet)
