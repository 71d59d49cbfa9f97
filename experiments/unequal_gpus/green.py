"""Makes a GPU slower: a stream of a green context may use only some of its multiprocessors.

Whatever is launched on the stream stays within them, whichever thread launches it: autograd's own
thread runs a backward operation on the stream of its forward operation. What runs on other streams
(NCCL, hytrain's update on the GPU, copies) has the whole device.

torch's own wrapper (torch.cuda.green_contexts) is younger than some versions of torch that this
runs on, hence the driver's functions by ctypes; their description is CUDA's driver API, "Green
Contexts". The driver rounds the number of multiprocessors up to its granularity, 8 on Hopper.
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch

_SM_RESOURCE = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1

# CUdevResource: type (4 bytes), 92 bytes of the driver's own, then the union that begins with the
# number of multiprocessors; 144 bytes in CUDA 12 and 13. More memory than that does no harm.
_RESOURCE_BYTES = 1024
_COUNT_OFFSET = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limited:
    """A stream with a part of a GPU.

    Attributes:
        stream: to be made torch's current stream.
        asked: multiprocessors asked for.
        granted: multiprocessors that it has.
        total: multiprocessors of the GPU.
    """

    stream: torch.cuda.Stream
    asked: int
    granted: int
    total: int


def _count(resource: ctypes.Array[ctypes.c_char]) -> int:
    return int.from_bytes(resource.raw[_COUNT_OFFSET : _COUNT_OFFSET + 4], "little")


class _Driver:
    """Calls the driver's functions by name, and checks what they return."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            words = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{name}: {words} ({code})")


def limited_stream(num_sms: int | None, device: int) -> Limited:
    """A new stream of a device that may use this many multiprocessors; None: all of them.

    The green context lives as long as the process.

    Raises:
        RuntimeError: the driver refuses.
        OSError: there is no driver.
    """
    torch.zeros(1, device=f"cuda:{device}")  # the device's primary context exists from here on
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if num_sms is None:
        return Limited(stream=torch.cuda.Stream(device), asked=total, granted=total, total=total)
    call = _Driver()
    handle = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), device)
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    call("cuDeviceGetDevResource", handle, whole, _SM_RESOURCE)
    groups = ctypes.c_uint(1)
    call(
        "cuDevSmResourceSplitByCount",
        part, ctypes.byref(groups), whole, rest, ctypes.c_uint(0), ctypes.c_uint(num_sms),
    )  # fmt: skip
    if groups.value != 1:
        raise RuntimeError(f"{num_sms} of {total} multiprocessors: the driver makes no such group")
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), part, ctypes.c_uint(1))
    call(
        "cuGreenCtxCreate",
        ctypes.byref(context), description, handle, ctypes.c_uint(_DEFAULT_STREAM),
    )  # fmt: skip
    call(
        "cuGreenCtxStreamCreate",
        ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0),
    )  # fmt: skip
    assert stream.value is not None
    external = torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", device))
    return Limited(stream=external, asked=num_sms, granted=_count(part), total=total)
