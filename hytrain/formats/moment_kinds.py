"""How moments ("hytrain.moments") and master weights ("hytrain.master") may be kept, and their
size. Plain numbers, no torch.

docs/internals.md, "Moments in fewer bytes", has the formats.
"""

from __future__ import annotations

from typing import Final, Literal

MomentsName = Literal["fp32", "bf16", "8bit"]
MasterName = Literal["fp32", "split"]

FP32: Final = "fp32"
MOMENTS: Final[tuple[MomentsName, ...]] = ("fp32", "bf16", "8bit")

SPLIT: Final = "split"
MASTER_BYTES: Final = 4
"""Bytes of an fp32 master weight."""
SPLIT_BYTES: Final = 2
"""Bytes of a split master weight that are kept beside its training copy."""
_BYTES: Final[dict[str, int]] = {"fp32": 4, "bf16": 2, "8bit": 1}
_CODE_BLOCK = 64
"""Elements that share an exponent of one byte if moments are 8-bit codes."""


def smaller_states(
    moments: MomentsName, master: MasterName, *, can_split: bool
) -> list[tuple[MomentsName, MasterName]]:
    """These moments and master weights, and those that take fewer bytes, the smallest change first;
    ``can_split``: whether master weights may be split."""
    masters: list[MasterName] = [master]
    if can_split and master != SPLIT:
        masters.append(SPLIT)
    kinds = MOMENTS[MOMENTS.index(moments) :]
    return [(kind, one) for one in masters for kind in kinds]


def moment_bytes(moments: str, parameters: int) -> int:
    """Bytes of both moments of this number of parameters."""
    exponents = -(-parameters // _CODE_BLOCK) if moments == "8bit" else 0
    return 2 * (_BYTES[moments] * parameters + exponents)


def master_bytes(master: str) -> int:
    """Bytes of a master weight."""
    return SPLIT_BYTES if master == SPLIT else MASTER_BYTES


def state_bytes(
    moments: str, parameters: int, master: str = FP32, states: int | None = None
) -> int:
    """Bytes of master weights and both moments, on the CPU or the GPU.

    ``states``: how many tensors an optimizer other than Adam has in place of the moments.
    """
    size = moment_bytes(moments, parameters)
    size = size if states is None else size // 2 * states
    return master_bytes(master) * parameters + size


def state_bytes_each(moments: str, master: str = FP32) -> float:
    """Bytes of state per parameter: 12, 8, or 6 and 1/32; 2 fewer if master weights are split."""
    whole, part = divmod(state_bytes(moments, _CODE_BLOCK, master), _CODE_BLOCK)
    return whole + part / _CODE_BLOCK if part else whole
