"""The few calls of the CUDA driver API that torch does not offer, through ctypes: IPC memory handles, stream memory
operations, graphs made of other graphs, and green contexts. All act on the context that is current in the calling
thread, which is torch's.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE, _MAPPED = 1, 2
_WAIT = struct.Struct("=I4xQQI4xQ8x")  # CUstreamBatchMemOpParams: operation, address, value, flags, alias
_WAIT_VALUE_64 = 4
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_AT_LEAST = 0  # a wait ends when the word, as a signed difference, has reached the value
_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, without which no green context is created
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_MAX_GROUPS = 1024


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class SmResource(ctypes.Structure):
    """CUdevResource, of type SM."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("_internal", ctypes.c_ubyte * 92),
        ("num_sms", ctypes.c_uint),
        ("_external", ctypes.c_ubyte * 44),
    )


class Driver:
    """libcuda, loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'').decode() or code}")

    def context(self) -> int:
        """The CUDA context that is current in this thread."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        assert context.value
        return context.value

    def use(self, context: int) -> None:
        """Make a context current in this thread."""
        self._call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def create_graph(self) -> int:
        """An empty CUDA graph."""
        graph = ctypes.c_void_p()
        self._call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        assert graph.value
        return graph.value

    def add_child_graph(self, graph: int, child: int, needs: Sequence[int]) -> int:
        """Add a node that runs a copy of `child` after the nodes `needs`; an empty node if `child` has no nodes."""
        node, num_nodes = ctypes.c_void_p(), ctypes.c_size_t(0)
        before = (ctypes.c_void_p * max(1, len(needs)))(*needs)
        self._call("cuGraphGetNodes", ctypes.c_void_p(child), None, ctypes.byref(num_nodes))
        position = (ctypes.byref(node), ctypes.c_void_p(graph), before, ctypes.c_size_t(len(needs)))
        if num_nodes.value:
            self._call("cuGraphAddChildGraphNode", *position, ctypes.c_void_p(child))
        else:
            self._call("cuGraphAddEmptyNode", *position)
        assert node.value
        return node.value

    def add_event_record(self, graph: int, event: int, needs: Sequence[int]) -> None:
        """Add a node that records an event, in each launch, after the nodes `needs`."""
        node, before = ctypes.c_void_p(), (ctypes.c_void_p * max(1, len(needs)))(*needs)
        position = (ctypes.byref(node), ctypes.c_void_p(graph), before, ctypes.c_size_t(len(needs)))
        self._call("cuGraphAddEventRecordNode", *position, ctypes.c_void_p(event))

    def instantiate_graph(self, graph: int) -> int:
        """Instantiate a graph and destroy it. Returns the executable."""
        executable = ctypes.c_void_p()
        try:
            self._call(
                "cuGraphInstantiateWithFlags", ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_uint64(0)
            )
        finally:
            self._call("cuGraphDestroy", ctypes.c_void_p(graph))
        assert executable.value
        return executable.value

    def launch_graph(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", ctypes.c_void_p(executable))

    @property
    def has_green_contexts(self) -> bool:
        """Whether this driver can restrict streams to a part of the SMs."""
        return hasattr(self._library, "cuGreenCtxStreamCreate")

    def split_sms(self, device: int) -> tuple[list[SmResource], SmResource]:
        """The SMs of a device in equal groups, the smallest that the driver grants, and the remaining SMs."""
        whole, rest, count = SmResource(), SmResource(), ctypes.c_uint(_MAX_GROUPS)
        self._call("cuDeviceGetDevResource", self._device(device), ctypes.byref(whole), ctypes.c_int(_SM_RESOURCE))
        flags, min_count = ctypes.c_uint(0), ctypes.c_uint(1)
        groups = (SmResource * _MAX_GROUPS)()
        self._call(
            "cuDevSmResourceSplitByCount",
            groups,
            ctypes.byref(count),
            ctypes.byref(whole),
            ctypes.byref(rest),
            flags,
            min_count,
        )
        return list(groups[: count.value]), rest

    def green_stream(self, device: int, resources: Sequence[SmResource]) -> int:
        """A stream in a green context with the SMs of these resources, which must be of one split. The context lives
        until the process ends."""
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call(
            "cuDevResourceGenerateDesc",
            ctypes.byref(description),
            (SmResource * len(resources))(*resources),
            ctypes.c_uint(len(resources)),
        )
        self._call(
            "cuGreenCtxCreate",
            ctypes.byref(context),
            description,
            self._device(device),
            ctypes.c_uint(_DEFAULT_STREAM),
        )
        self._call(
            "cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0)
        )
        assert stream.value
        return stream.value

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        return device

    def load_kernel(self, ptx: bytes, name: bytes) -> int:
        """A kernel that runs in the context of the stream on which it is launched."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        options = (None, None, ctypes.c_uint(0)) * 2
        self._call("cuLibraryLoadData", ctypes.byref(library), ctypes.c_char_p(ptx), *options)
        self._call("cuLibraryGetKernel", ctypes.byref(kernel), library, ctypes.c_char_p(name))
        assert kernel.value
        return kernel.value

    def launch_kernel(
        self, kernel: int, stream: int, num_blocks: int, num_threads: int, arguments: Sequence[ctypes._SimpleCData[int]]
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = (ctypes.c_uint(size) for size in (num_blocks, 1, 1, num_threads, 1, 1, 0))
        self._call("cuLaunchKernel", ctypes.c_void_p(kernel), *sizes, ctypes.c_void_p(stream), addresses, None)

    def export(self, address: int) -> bytes:
        """The IPC handle by which another process maps this allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def allocation_of(self, address: int) -> tuple[int, int, int] | None:
        """Base address, bytes and buffer ID of the allocation around an address; the driver never reuses an ID."""
        base, size, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            self._call(
                "cuPointerGetAttribute", ctypes.byref(number), ctypes.c_int(_BUFFER_ID), ctypes.c_uint64(address)
            )
        except RuntimeError:
            return None
        return base.value, size.value, number.value

    def open(self, handle: bytes) -> int:
        address, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def register(self, address: int, num_bytes: int) -> int:
        """Register host memory with the GPU. Returns its device address."""
        size, seen = ctypes.c_size_t(num_bytes), ctypes.c_uint64()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, ctypes.c_uint(_PORTABLE | _MAPPED))
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
        return seen.value

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Enqueue a write of a 64-bit word after all work of the stream, with a memory fence."""
        words = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(value)
        self._call("cuStreamWriteValue64_v2", *words, ctypes.c_uint(0))

    def wait_values(self, stream: int, values: Sequence[tuple[int, int]]) -> None:
        """Enqueue a wait until each 64-bit word, given by address, has reached its value."""
        waits = b"".join(_WAIT.pack(_WAIT_VALUE_64, address, value, _AT_LEAST, 0) for address, value in values)
        self._call(
            "cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint(len(values)), waits, ctypes.c_uint(0)
        )
