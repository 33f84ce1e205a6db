# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of tensors in GGUF files: their numbers, their sizes, and the forks that load them.

Sources: ggml.h, and type_traits of ggml.c, in builds 11063 and 11434 and in ik_llama.cpp's commit 4840 (8337e4cd); F8_E4M3 in wllama 3.13.0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE


class TensorType(NamedTuple):
    """Type of tensors: its name, elements and bytes of a block, and extra bytes per row."""

    name: str
    block_elements: int
    block_bytes: int
    extra_row_bytes: int = 0

    def size(self, row_elements: int, row_count: int) -> int:
        """Return the bytes of a tensor.

        :param row_elements: number of elements in a row.
        """
        return row_count * (row_elements // self.block_elements * self.block_bytes + self.extra_row_bytes)


SHARED_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
    41: TensorType("Q1_0", 128, 18),
}
"""Types that both forks have, by number."""

MAINLINE_TYPES = {
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    40: TensorType("NVFP4", 64, 36),
    42: TensorType("Q2_0", 64, 18),
    43: TensorType("F8_E4M3", 1, 1),
}
IK_LLAMA_TYPES = {
    31: TensorType("Q4_0_4_4", 32, 18),
    32: TensorType("Q4_0_4_8", 32, 18),
    33: TensorType("Q4_0_8_8", 32, 18),
    133: TensorType("Q6_0", 32, 26),
    134: TensorType("IQ1_BN", 64, 13, 2),
    135: TensorType("IQ2_BN", 64, 16, 4),
    137: TensorType("IQ2_K", 256, 76),
    138: TensorType("IQ3_K", 256, 110),
    139: TensorType("IQ4_K", 256, 144),
    140: TensorType("IQ5_K", 256, 176),
    141: TensorType("IQ6_K", 256, 212),
    144: TensorType("IQ4_KS", 256, 136, 4),
    145: TensorType("IQ2_KS", 256, 70, 2),
    146: TensorType("IQ4_KSS", 256, 128, 4),
    151: TensorType("Q8_KV", 32, 32, 8),
    152: TensorType("IQ5_KS", 256, 168, 4),
    153: TensorType("IQ2_KT", 256, 68, 4),
    154: TensorType("IQ3_KT", 256, 100, 4),
    155: TensorType("IQ4_KT", 256, 128, 4),
    156: TensorType("IQ3_KS", 256, 102, 2),
    157: TensorType("IQ2_KL", 256, 86, 2),
    158: TensorType("IQ1_KT", 256, 56, 4),
    202: TensorType("Q4_0_R8", 32, 18),
    206: TensorType("Q5_0_R4", 32, 22),
    208: TensorType("Q8_0_R8", 32, 34),
    210: TensorType("Q2_K_R4", 256, 84),
    211: TensorType("Q3_K_R4", 256, 110),
    212: TensorType("Q4_K_R4", 256, 144),
    213: TensorType("Q5_K_R4", 256, 176),
    214: TensorType("Q6_K_R4", 256, 210),
    216: TensorType("IQ2_XXS_R4", 256, 66),
    217: TensorType("IQ2_XS_R4", 256, 74),
    218: TensorType("IQ3_XXS_R4", 256, 98),
    219: TensorType("IQ1_S_R4", 32, 6, 2),
    220: TensorType("IQ4_NL_R4", 32, 18),
    221: TensorType("IQ3_S_R4", 256, 110),
    222: TensorType("IQ2_S_R4", 256, 82),
    223: TensorType("IQ4_XS_R8", 256, 136),
    229: TensorType("IQ1_M_R4", 32, 7, 2),
    230: TensorType("BF16_R16", 1, 2),
    233: TensorType("Q6_0_R4", 32, 26),
    335: TensorType("IQ2_BN_R4", 64, 16, 4),
    337: TensorType("IQ2_K_R4", 256, 76),
    338: TensorType("IQ3_K_R4", 256, 110),
    339: TensorType("IQ4_K_R4", 256, 144),
    340: TensorType("IQ5_K_R4", 256, 176),
    344: TensorType("IQ4_KS_R4", 256, 136, 4),
    352: TensorType("IQ5_KS_R4", 256, 168, 4),
    353: TensorType("MXFP4_R8", 32, 17),
    397: TensorType("Q8_K_R16", 256, 258),
    398: TensorType("Q8_KV_R8", 32, 32, 4),
    399: TensorType("Q8_K_R8", 256, 258),
}
"""Types that only one fork has, by number, except for types that never occur in files."""

ALL_TYPES = {**SHARED_TYPES, **MAINLINE_TYPES, **IK_LLAMA_TYPES}

EXCLUSIVE_TYPES = {
    fork: frozenset(kind.name for kind in kinds.values())
    for fork, kinds in ((MAINLINE, MAINLINE_TYPES), (IK_LLAMA, IK_LLAMA_TYPES))
}
"""Names of the types that only this fork has, by fork."""
FUTURE_NUMBERS, FUTURE_PREFIX = {*range(max(MAINLINE_TYPES) + 1, 512)} - set(ALL_TYPES), "type "
"""Numbers that newer builds may assign to types, and prefix of the names of such types. Offsets in the file determine the size of their tensors."""

FIRST_BUILDS = {"F8_E4M3": 12211}
"""First reviewed build of llama.cpp with each type, unless it is the oldest supported build."""


def unknown_types(kinds: Collection[str]) -> list[str]:
    """Return the types that no reviewed build has."""
    return sorted({*kinds} - {kind.name for kind in ALL_TYPES.values()})


def types_of_other_forks(kinds: Collection[str], fork: str) -> list[str]:
    """Return the types that only another fork has."""
    return sorted(kind for owner, names in EXCLUSIVE_TYPES.items() if owner != fork for kind in names & set(kinds))
