"""Where CPython and libtorch keep things: every offset that the decoder uses, as checked data.

All numbers are bytes from the start of the structure named, unless they say otherwise; -1 stands for a member that a
version does not have. They are measured by
``probe.py`` under the target's own interpreter, or come from the tables that were measured the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from sgdiag.remote.errors import CalibrationError

_MAX_OFFSET = 1 << 18
_MIN_OFFSET = -64

LAYOUT_FORMAT = 1


@dataclass(frozen=True)
class TypeLayout:
    """``PyTypeObject`` and ``PyHeapTypeObject``. ``of_object`` is ``ob_type`` in every object.

    ``bases`` is ``tp_mro``, ``namespace`` is ``tp_dict``, ``cached_keys`` the shared keys of instances.
    """

    of_object: int
    name: int
    basicsize: int
    itemsize: int
    flags: int
    dictoffset: int
    bases: int
    namespace: int
    cached_keys: int


@dataclass(frozen=True)
class NumberLayout:
    """``int_tagged``: 1 where the size word of an int is ``lv_tag`` (3.12+), 0 where it is ``ob_size``."""

    int_tagged: int
    int_digit: int
    int_digit_bits: int
    float_value: int
    complex_value: int


@dataclass(frozen=True)
class TextLayout:
    """``str`` and ``bytes``. ``kind_shift``, ``ascii_bit`` and ``compact_bit`` are bit numbers in ``state``."""

    length: int
    state: int
    kind_shift: int
    ascii_bit: int
    compact_bit: int
    ascii_data: int
    compact_data: int
    any_data: int
    bytes_data: int
    bytearray_start: int


@dataclass(frozen=True)
class SequenceLayout:
    """``list``, ``tuple``, ``set``, ``deque``, ``array.array``, ``range`` and ``slice``."""

    list_items: int
    tuple_items: int
    set_used: int
    set_mask: int
    set_table: int
    deque_size: int
    deque_left_block: int
    deque_left_index: int
    deque_block_data: int
    deque_block_items: int
    deque_block_next: int
    array_items: int
    array_descriptor: int
    range_start: int
    slice_start: int


@dataclass(frozen=True)
class DictLayout:
    """``dict`` and its table of keys.

    ``index_is_log2``: 1 where the byte at ``index`` is the logarithm of the index table's size in bytes, 0 where the
    word there is the number of slots (3.10). ``kind`` is the byte that tells general (0), unicode (1) and split (2)
    tables apart. The first entry stands ``*_entries`` bytes behind the end of the index table.
    """

    used: int
    keys: int
    values: int
    values_items: int
    index_is_log2: int
    index: int
    kind: int
    count: int
    general_entries: int
    general_stride: int
    general_value: int
    unicode_entries: int
    unicode_stride: int
    unicode_value: int
    split_entries: int
    split_stride: int


@dataclass(frozen=True)
class InstanceLayout:
    """Where a plain instance keeps its attributes.

    ``mode`` 0: a dict at ``tp_dictoffset``. 1 (3.11): a pointer to values at ``values`` and one to a dict at ``dict``.
    2 (3.12): one word at ``dict``, odd if it leads to values. 3 (3.13+): values behind the object, valid while the
    byte ``inline_valid`` is 1, unless there is a dict at ``own_dict``. ``values_items``: from that pointer, or from the
    object's end, to the first value.
    """

    mode: int
    own_dict: int
    values: int
    values_items: int
    inline_valid: int


@dataclass(frozen=True)
class MiscLayout:
    """Small objects. ``member_*`` describe slots, ``tuplegetter_index`` the fields of named tuples."""

    cell: int
    method_function: int
    weakref_object: int
    partial_function: int
    function_code: int
    property_getter: int
    tuplegetter_index: int
    member_definition: int
    member_type: int
    member_offset: int
    member_object_type: int


@dataclass(frozen=True)
class CodeLayout:
    """``PyCodeObject``. ``instructions`` is where bytecode starts in it, -1 in 3.10."""

    name: int
    qualified_name: int
    filename: int
    first_line: int
    line_table: int
    variables: int
    cell_variables: int
    free_variables: int
    names: int
    instructions: int


@dataclass(frozen=True)
class FrameLayout:
    """``_PyInterpreterFrame``, or ``PyFrameObject`` in 3.10. ``instruction``: a pointer, or ``f_lasti`` in 3.10.

    ``tag_mask``: bits of a reference that are not address (3.14).
    """

    code: int
    previous: int
    locals: int
    instruction: int
    tag_mask: int


@dataclass(frozen=True)
class RuntimeLayout:
    """``_PyRuntime``, interpreter and thread states.

    ``thread_frame_indirect``: -1, or the offset of the frame in what ``thread_frame`` points to (3.11, 3.12).
    """

    interpreters_head: int
    interpreter_threads: int
    interpreter_modules: int
    thread_next: int
    thread_ident: int
    thread_native: int
    thread_frame: int
    thread_frame_indirect: int


@dataclass(frozen=True)
class TorchLayout:
    """``THPVariable``, ``TensorImpl`` and ``StorageImpl``. Codes of dtypes and devices map to their names."""

    implementation: int
    storage: int
    storage_data: int
    storage_bytes: int
    dimensions: int
    sizes: int
    inline_dimensions: int
    storage_offset: int
    elements: int
    dtype: int
    device: int
    dtype_name: int
    device_value: int
    dtypes: Mapping[int, str]
    item_bytes: Mapping[str, int]
    devices: Mapping[int, str]


@dataclass(frozen=True)
class Layout:
    """All of the above for one build of CPython."""

    version: tuple[int, int]
    types: TypeLayout
    numbers: NumberLayout
    text: TextLayout
    sequences: SequenceLayout
    dicts: DictLayout
    instances: InstanceLayout
    misc: MiscLayout
    code: CodeLayout
    frames: FrameLayout
    runtime: RuntimeLayout

    def to_json(self) -> dict[str, Any]:
        """A plain dict that ``layout_from_json`` takes back."""
        return {"format": LAYOUT_FORMAT, **dataclasses.asdict(self)}


_Section = TypeVar("_Section")


def _whole(value: object, where: str) -> int:
    if type(value) is not int or not _MIN_OFFSET <= value <= _MAX_OFFSET:
        raise CalibrationError(f"layout: {where} is no offset")
    return value


def _section(kind: type[_Section], data: object, where: str) -> _Section:
    if not isinstance(data, dict):
        raise CalibrationError(f"layout: {where} is missing")
    return kind(**{name: _whole(data.get(name), f"{where}.{name}") for name in get_type_hints(kind)})


def layout_from_json(data: object) -> Layout:
    """The layout that ``data`` describes. Raises CalibrationError for anything that is not one."""
    if not isinstance(data, dict) or data.get("format") != LAYOUT_FORMAT:
        raise CalibrationError("layout: of another format")
    version = data.get("version")
    if not (isinstance(version, list | tuple) and len(version) == 2):
        raise CalibrationError("layout: version is missing")
    sections: dict[str, Any] = {
        name: _section(kind, data.get(name), name) for name, kind in get_type_hints(Layout).items() if name != "version"
    }
    return Layout(version=(_whole(version[0], "version"), _whole(version[1], "version")), **sections)


def torch_layout_from_json(data: object) -> TorchLayout:
    """The same for libtorch."""
    if not isinstance(data, dict):
        raise CalibrationError("layout: torch is missing")
    offsets = {
        name: _whole(data.get(name), f"torch.{name}")
        for name, hint in get_type_hints(TorchLayout).items()
        if hint is int
    }
    return TorchLayout(
        **offsets,
        dtypes=_names(data.get("dtypes"), "dtypes"),
        devices=_names(data.get("devices"), "devices"),
        item_bytes={name: size for size, name in _pairs(data.get("item_bytes"), "item_bytes")},
    )


def torch_layout_to_json(layout: TorchLayout) -> dict[str, Any]:
    """A plain dict that ``torch_layout_from_json`` takes back."""
    data = dataclasses.asdict(layout)
    data["dtypes"] = [[code, name] for code, name in layout.dtypes.items()]
    data["devices"] = [[code, name] for code, name in layout.devices.items()]
    data["item_bytes"] = [[size, name] for name, size in layout.item_bytes.items()]
    return data


def _names(data: object, where: str) -> dict[int, str]:
    return dict(_pairs(data, where))


def _pairs(data: object, where: str) -> list[tuple[int, str]]:
    if not isinstance(data, list) or len(data) > 256:
        raise CalibrationError(f"layout: torch.{where} is missing")
    pairs: list[tuple[int, str]] = []
    for pair in data:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str)):
            raise CalibrationError(f"layout: torch.{where} is damaged")
        pairs.append((_whole(pair[0], where), pair[1]))
    return pairs
