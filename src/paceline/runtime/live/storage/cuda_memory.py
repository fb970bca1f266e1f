"""Memory of a GPU that several processes map, by the driver's virtual memory interface.

An allocation is a file descriptor with counted references: what a process has mapped stays valid when the process that
made it is gone, and is free when nobody has it any more. (CUDA IPC's memory belongs to the process that made it, and
torch's caching allocator reuses what it hands out.) A tensor over such memory is made without a copy, by
`__cuda_array_interface__`.

Nothing here is touched by a run whose models are on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from paceline.errors import PacelineError

PINNED = ON_DEVICE = AS_DESCRIPTOR = 1
"""Of the driver's enumerations: the type of an allocation, of its location, and of its handle."""
READ, READ_AND_WRITE = 1, 3
"""Access flags of a mapping."""
SHARES_DESCRIPTORS = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class DriverError(PacelineError):
    """The driver of the GPU refuses something."""


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver; raises `DriverError` with its words if that fails."""
    code = getattr(driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'error %d' % code).decode()}")


class Mapping:
    """A part of the address space with an allocation behind it, for as long as a tensor over it lives."""

    def __init__(self, handle: ctypes.c_uint64, nbytes: int, index: int, access: int) -> None:
        self.nbytes = nbytes
        self.pid = os.getpid()
        self.address, nothing = ctypes.c_uint64(), ctypes.c_uint64(0)
        size = ctypes.c_size_t(nbytes)
        call("cuMemAddressReserve", ctypes.byref(self.address), size, ctypes.c_size_t(0), nothing, nothing)
        call("cuMemMap", self.address, size, ctypes.c_size_t(0), handle, nothing)
        wanted = AccessDescription(Location(ON_DEVICE, index), access)
        call("cuMemSetAccess", self.address, size, ctypes.byref(wanted), ctypes.c_size_t(1))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address.value, False)
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": data, "strides": None}

    def __del__(self) -> None:
        if os.getpid() == self.pid:
            size = ctypes.c_size_t(self.nbytes)
            driver().cuCtxSynchronize()  # what was given to the device before may still use it
            driver().cuMemUnmap(self.address, size)
            driver().cuMemAddressFree(self.address, size)


class CudaDevice:
    """One GPU, by its UUID: its number differs between processes (CUDA_VISIBLE_DEVICES)."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.place = torch.device("cuda", index)
        """How this process calls it."""

    @classmethod
    def at(cls, index: int) -> Self:
        """Returns the GPU with this number; raises `DriverError` if its memory cannot be shared."""
        begin()
        code, device = ctypes.create_string_buffer(16), ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDeviceGetUuid_v2", code, device)
        shares = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(shares), SHARES_DESCRIPTORS, device)
        if not shares.value:
            raise DriverError("its memory cannot be shared by file descriptors")
        torch.cuda.synchronize(index)  # makes its context
        return cls(f"cuda:{uuid.UUID(bytes=code.raw)}", index)

    @classmethod
    def named(cls, name: str) -> Self:
        """Returns the GPU with this name, if this process sees it."""
        begin()
        for index in range(torch.cuda.device_count()):
            found = cls.at(index)
            if found.name == name:
                return found
        raise DriverError(f"{name} is not visible here")

    def allocate(self, nbytes: int) -> tuple[Tensor, int]:
        """Returns new memory, as bytes, and the descriptor by which others map it."""
        index = self.place.index
        properties = AllocationProperties(PINNED, AS_DESCRIPTOR, Location(ON_DEVICE, index))
        unit, handle, descriptor = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int()
        call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
        size = -(-nbytes // unit.value) * unit.value
        call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_uint64(0))
        try:
            call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, AS_DESCRIPTOR, ctypes.c_uint64(0))
            return self._over(Mapping(handle, size, index, READ_AND_WRITE)), descriptor.value
        finally:
            driver().cuMemRelease(handle)

    def open(self, descriptor: int, nbytes: int, writes: bool) -> Tensor:
        """Maps memory that another process made, all `nbytes` of it. Without `writes`, writing to it is a fault."""
        handle = ctypes.c_uint64()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), AS_DESCRIPTOR)
        try:
            return self._over(Mapping(handle, nbytes, self.place.index, READ_AND_WRITE if writes else READ))
        finally:
            driver().cuMemRelease(handle)

    def _over(self, mapping: Mapping) -> Tensor:
        return torch.as_tensor(mapping, device=self.place)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.place)[0]

    def settle(self) -> None:
        """Returns when the device has done what its current stream was given."""
        torch.cuda.current_stream(self.place).synchronize()


def begin() -> None:
    """Starts CUDA; raises `DriverError` where that cannot be."""
    if torch.cuda._is_in_bad_fork():
        raise DriverError("this process was forked from one that had used CUDA")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise DriverError(str(error).splitlines()[0]) from None
