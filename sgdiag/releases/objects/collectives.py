"""Process groups and what each of them may reduce with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sgdiag.releases.objects.form import Alternative, Row, absent, along, at, row

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "world": "_WORLD",
        "tp": "_TP",
        "attention_tp": "_ATTN_TP",
        "attn_cp": "_ATTN_CP",
        "moe_ep": "_MOE_EP",
        "moe_tp": "_MOE_TP",
        "pp": "_PP",
    }
)
"""SGLang's name of a group -> the global that holds it. One object can stand for several groups (attention_tp is tp
without attention DP): its ``name`` then says which one it was made for."""

NOT_WANTED = "not asked for"
"""What is said of a group that was made without custom allreduce on purpose: ``world`` in every release, and all groups
where it is switched off."""

_STATE = "sglang.srt.distributed.parallel_state"
_CUSTOM = "CustomAllreduce|CustomAllReduceV2"


def _switch(name: str, attribute: str, means: str, owners: str, group: tuple[Alternative, ...]) -> list[Row]:
    """An optional communicator: its class (None: not made) and whether it stands by, switched off."""
    place = along(group, f"GroupCoordinator.{attribute}")
    return [
        row(f"{name}.class", "static", "class", f"class of {means}, None where it was not made", *place),
        row(f"{name}.disabled", "slow", "value", f"whether {means} is off", *along(place, f"{owners}.disabled")),
    ]


def _pcie(name: str, group: tuple[Alternative, ...]) -> list[Row]:
    place = along(group, "GroupCoordinator.pcie_ipc_comm", since="0.5.21")
    before = absent("the PCIe all-reduce came with 0.5.21", until="0.5.21", missing=("GroupCoordinator.pcie_ipc_comm",))
    return [
        row(
            f"{name}.class",
            "static",
            "class",
            "class of the PCIe all-reduce, None where it was not made",
            *place,
            before,
        ),
        row(
            f"{name}.disabled",
            "slow",
            "value",
            "whether the PCIe all-reduce is off",
            *along(place, "PcieIpcCommunicator.disabled"),
            before,
        ),
        row(
            f"{name}.elements",
            "static",
            "value",
            "largest tensor that the PCIe all-reduce takes, in elements",
            *along(place, "PcieIpcCommunicator.max_numel"),
            before,
        ),
    ]


def _group(name: str, variable: str) -> list[Row]:
    group = (at(f"@{_STATE}:{variable}"),)
    custom = along(group, "GroupCoordinator.ca_comm")
    return [
        row(f"groups.{name}", "static", "class", f"class of the {name} group, None without", *group),
        row(
            f"groups.{name}.name",
            "static",
            "value",
            "the name that it was made under, with a number after a colon",
            *along(group, "GroupCoordinator.unique_name"),
        ),
        row(
            f"groups.{name}.size",
            "static",
            "value",
            "ranks in it",
            *along(group, "GroupCoordinator.world_size"),
            field=f"collectives.communicators[{name}].size_ranks",
            unit="ranks",
        ),
        row(f"groups.{name}.ranks", "static", "values", "global ranks in it", *along(group, "GroupCoordinator.ranks")),
        row(
            f"groups.{name}.wants_custom",
            "static",
            "value",
            "whether a custom all-reduce was asked for; one made but disabled was ruled out by the hardware",
            *along(group, "GroupCoordinator.use_custom_allreduce"),
        ),
        *_switch(f"groups.{name}.custom", "ca_comm", "the custom all-reduce", _CUSTOM, group),
        row(
            f"groups.{name}.custom.full_nvlink",
            "static",
            "value",
            "whether every pair of devices is joined by NVLink; the newer kernel (V2) is only made where this holds",
            *along(custom, "CustomAllreduce.full_nvlink"),
        ),
        row(
            f"groups.{name}.custom.largest",
            "static",
            "value",
            "largest tensor that the custom all-reduce takes",
            *along(custom, "CustomAllreduce.max_size", until="0.5.11"),
            *along(custom, f"{_CUSTOM}.max_size", since="0.5.11"),
            unit="bytes",
        ),
        *_switch(f"groups.{name}.pynccl", "pynccl_comm", "SGLang's own NCCL communicator", "PyNcclCommunicator", group),
        *_pcie(f"groups.{name}.pcie", group),
        *_switch(f"groups.{name}.mscclpp", "pymscclpp_comm", "the MSCCL++ all-reduce", "PyMscclppCommunicator", group),
        *_switch(
            f"groups.{name}.symm_mem",
            "torch_symm_mem_comm",
            "torch's symmetric-memory all-reduce",
            "TorchSymmMemCommunicator",
            group,
        ),
        *_switch(f"groups.{name}.quick", "qr_comm", "the quick all-reduce (ROCm)", "QuickAllReduce", group),
    ]


ROWS: tuple[Row, ...] = (
    *(entry for name, variable in GROUPS.items() for entry in _group(name, variable)),
    row(
        "collectives.nccl_version",
        "static",
        "value",
        "NCCL that SGLang's own communicator loaded, as a number or as text",
        at(f"@{_STATE}:_TP GroupCoordinator.pynccl_comm PyNcclCommunicator.nccl_version"),
        field="collectives.nccl_version",
    ),
    row(
        "collectives.custom_allowed",
        "static",
        "value",
        "False with --disable-custom-all-reduce",
        at(f"@{_STATE}:_ENABLE_CUSTOM_ALL_REDUCE"),
    ),
)
