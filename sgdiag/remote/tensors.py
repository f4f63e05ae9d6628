"""torch tensors: what their headers say, and the values of small ones in host memory."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from sgdiag.remote.errors import BadAddressError, OpaqueError, TornError
from sgdiag.remote.layout import TorchLayout
from sgdiag.remote.memory import Block
from sgdiag.remote.objects import Objects

_MAX_DIMENSIONS = 64
_FORMATS = {
    "int8": "b",
    "uint8": "B",
    "bool": "?",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}


@dataclass(frozen=True)
class Tensor:
    """``data``: the values in row-major order, of a small contiguous tensor in host memory; else None.

    ``storage_offset`` counts elements; ``storage_bytes`` is the size of the whole storage, which views share.
    ``data_address`` is the first element's, in the tensor's own memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    elements: int
    storage_offset: int
    storage_bytes: int
    data_address: int
    data: tuple[int | float | bool, ...] | None


class Tensors:
    """Decodes tensors by the layout of one libtorch."""

    def __init__(self, objects: Objects, layout: TorchLayout) -> None:
        self._objects = objects
        self._layout = layout

    def dtype(self, address: int) -> str:
        """The name of a ``torch.dtype``, as ``bfloat16``."""
        return self._objects.c_string(address + self._layout.dtype_name, 64)

    def device(self, address: int) -> str:
        """The name of a ``torch.device``, as ``cuda:0``."""
        kind, index = struct.unpack("<Bb", self._objects.read(address + self._layout.device_value, 2))
        return self._device_name(kind, index)

    def _device_name(self, kind: int, index: int) -> str:
        name = self._layout.devices.get(kind)
        if name is None:
            raise TornError(f"a device of unknown kind {kind}")
        return f"{name}:{index}" if index >= 0 else name

    def first_size(self, address: int) -> int | None:
        """How long the first dimension of the tensor there is; None if it has none."""
        place = self.place_of_shape(address)
        shape, _ = self._shape(self._objects.read(*place), self._shape_start)
        return shape[0] if shape else None

    def place_of_shape(self, address: int) -> Block:
        """Where the tensor there keeps its shape."""
        layout = self._layout
        end = max(layout.dimensions, layout.sizes + 8 * (layout.inline_dimensions - 1), layout.elements) + 8
        return self._implementation(address) + self._shape_start, end - self._shape_start

    @property
    def _shape_start(self) -> int:
        layout = self._layout
        return min(layout.dimensions, layout.sizes, layout.elements)

    def _implementation(self, address: int) -> int:
        found = self._objects.word(address + self._layout.implementation)
        if not found:
            raise OpaqueError("an undefined tensor")
        return found

    def _shape(self, header: bytes, start: int) -> tuple[tuple[int, ...], int]:
        """The sizes and, where they and the strides stand outside of the header, their address, else 0."""
        layout = self._layout
        (dimensions,) = struct.unpack_from("<Q", header, layout.dimensions - start)
        if dimensions > _MAX_DIMENSIONS:
            raise TornError("a tensor of impossible dimensions")
        outside = 0
        if dimensions <= layout.inline_dimensions:
            shape = struct.unpack_from(f"<{dimensions}q", header, layout.sizes - start)
        else:
            (outside,) = struct.unpack_from("<Q", header, layout.sizes - start)
            shape = struct.unpack(f"<{dimensions}q", self._objects.read(outside, 8 * dimensions))
        (elements,) = struct.unpack_from("<q", header, layout.elements - start)
        if any(size < 0 for size in shape) or math.prod(shape) != elements:
            raise TornError("a tensor whose shape and number of elements disagree")
        return shape, outside

    def tensor(self, address: int, max_elements: int) -> Tensor:
        """The tensor there, with its data if it has at most ``max_elements`` in contiguous host memory."""
        layout, read = self._layout, self._objects.read
        implementation = self._implementation(address)
        start = min(layout.storage, layout.dimensions, layout.sizes)
        header = read(implementation + start, self._header_end() - start)

        def field(form: str, at: int) -> tuple[int, ...]:
            return struct.unpack_from("<" + form, header, at - start)

        shape, outside = self._shape(header, start)
        if outside:
            stride = struct.unpack(f"<{len(shape)}q", read(outside + 8 * len(shape), 8 * len(shape)))
        else:
            stride = field(f"{len(shape)}q", layout.sizes + 8 * layout.inline_dimensions)
        (elements,) = field("q", layout.elements)
        (code,) = field("H", layout.dtype)
        dtype = layout.dtypes.get(code)
        kind, index, known = field("BbB", layout.device)
        (offset,), (storage,) = field("q", layout.storage_offset), field("Q", layout.storage)
        if dtype is None or known != 1 or offset < 0:
            raise TornError("a tensor of an unknown form")
        device = self._device_name(kind, index)
        base, storage_bytes = self._storage(storage)
        item = layout.item_bytes.get(dtype, 0)
        data_address = base + offset * item if base else 0
        data = None
        if device == "cpu" and elements <= max_elements and _is_contiguous(shape, stride):
            data = self._data(data_address, dtype, elements)
        return Tensor(shape, stride, dtype, device, elements, offset, storage_bytes, data_address, data)

    def _header_end(self) -> int:
        layout = self._layout
        return max(
            layout.sizes + 16 * layout.inline_dimensions,
            layout.elements + 8,
            layout.storage_offset + 8,
            layout.storage + 8,
            layout.dtype + 2,
            layout.device + 3,
        )

    def _storage(self, address: int) -> tuple[int, int]:
        layout = self._layout
        if not address:
            return 0, 0
        start = min(layout.storage_data, layout.storage_bytes)
        data = self._objects.read(address + start, max(layout.storage_data, layout.storage_bytes) + 8 - start)
        (base,) = struct.unpack_from("<Q", data, layout.storage_data - start)
        (size,) = struct.unpack_from("<q", data, layout.storage_bytes - start)
        if size < 0:
            raise TornError("a storage of impossible size")
        return base, size

    def _data(self, address: int, dtype: str, elements: int) -> tuple[int | float | bool, ...] | None:
        if not elements:
            return ()
        if dtype not in _FORMATS or not address:
            return None
        form = f"<{elements}{_FORMATS[dtype]}"
        try:
            return struct.unpack(form, self._objects.read(address, struct.calcsize(form)))
        except BadAddressError:
            # Memory of the host that belongs to a device's mapping is not for us to read.
            return None


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
