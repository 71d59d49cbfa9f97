"""A cable between two hosts with a bandwidth and a delay, for kernels without traffic control.

    python slow_wire.py PROCESS ADDRESS PROCESS ADDRESS BITS_PER_SECOND DELAY_SECONDS

Both ends are TUN interfaces, wire0, in the network namespaces of the two processes. This program
carries their packets: one after another at the bandwidth, each with the delay, and drops none.
Packets are large, so that a few thousand a second make a gigabit.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # Linux, include/uapi/linux/if_tun.h
_MOST_BYTES = 60_000
_SMALL_BYTES = 200
_CATCH_UP_SECONDS = 0.005
"""A wire that was scheduled late sends at once what it would have sent in at most this time."""


def _interface(process: str, address: str) -> int:
    """Creates an end in a process's namespace; returns the descriptor of its packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    name = f"wire{process}"
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(f"ip link set {name} netns {process} name wire0".split(), check=True)
    inside = ["nsenter", "-t", process, "-n", "ip"]
    subprocess.run([*inside, *f"addr add {address}/24 dev wire0".split()], check=True)
    subprocess.run([*inside, *f"link set wire0 mtu {_MOST_BYTES} up".split()], check=True)
    return descriptor


def _carry(source: int, target: int, bits_per_second: float, delay: float) -> None:
    """Carries one direction: packets with data one after another, small ones past them."""
    waiting: queue.Queue[bytes] = queue.Queue()

    def pace() -> None:
        free_at = time.monotonic()
        arrive = _after(target, delay)
        while True:
            packet = waiting.get()
            free_at = max(free_at, time.monotonic() - _CATCH_UP_SECONDS)
            free_at += 8.0 * len(packet) / bits_per_second
            time.sleep(max(0.0, free_at - time.monotonic()))
            arrive(packet)

    threading.Thread(target=pace, daemon=True).start()
    arrive = _after(target, delay)
    with suppress(OSError):  # its host has ended
        while True:
            packet = os.read(source, 1 << 17)
            # Acknowledgements queued behind this side's data would halve the other side's rate.
            (waiting.put if len(packet) > _SMALL_BYTES else arrive)(packet)


def _after(target: int, delay: float) -> Callable[[bytes], None]:
    """Returns a function that writes packets after a delay."""
    on_the_way: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def arrive() -> None:
        while True:
            due, packet = on_the_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(OSError):
                os.write(target, packet)

    threading.Thread(target=arrive, daemon=True).start()
    return lambda packet: on_the_way.put((time.monotonic() + delay, packet))


def main(one: str, address: str, other: str, other_address: str, rate: str, delay: str) -> None:
    """Carries packets until stdin ends; see the module for the arguments."""
    # It must not be late, whatever else the machine does; it waits nearly all of the time.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = _interface(one, address), _interface(other, other_address)
    threads = [
        threading.Thread(target=_carry, args=(*way, float(rate), float(delay)), daemon=True)
        for way in (ends, ends[::-1])
    ]
    for thread in threads:
        thread.start()
    print("carries", flush=True)
    sys.stdin.read()  # until whoever has started it ends


if __name__ == "__main__":
    main(*sys.argv[1:])
