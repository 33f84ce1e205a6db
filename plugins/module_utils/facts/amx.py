# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whether programs can use the tiles of Intel's AMX, because a kernel or hypervisor may refuse them although the processor announces AMX.

llama.cpp asks the kernel for permission (ggml_amx_init) and uses plain vectors if it is refused. Some virtual machines grant it, but the first
tile instruction raises SIGILL. So a child process repeats the steps of llama.cpp: it asks, configures tiles in another thread, and multiplies
after other threads have run.

Some versions of GCC miscompile llama.cpp's tiles (12.2 does, 13.3 does not). Their header says that ldtilecfg reads only eight bytes of the
configuration, so the optimiser drops writes to the rest, and llama-server crashes with SIGSEGV (GCC bug 114098).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

AMX_FLAGS = {"amx_tile", "amx_int8"}
"""Flags in /proc/cpuinfo for which llama.cpp is compiled with AMX."""
MAX_PROGRAM_SECONDS = 20
TILE_HEADER, FAULTY_OPERAND = "include/amxtileintrin.h", "(const void **)__config"
"""The compiler's header for tiles, and a text that only a faulty header contains."""

TILE_PROGRAM = """
import ctypes, mmap, struct, sys, threading, time

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
CONFIGURE = "c4e2784907 c3"  # ldtilecfg (%rdi); ret
MULTIPLY = "c4e27b49c0 c4e27b49c8 c4e27b49d0 c4e26b5ec1 c4e27849c0 c3"  # tilezero of 0, 1, 2; tdpbssd; tilerelease; ret

if ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
    sys.exit("the kernel refuses tile data")

def function(code):
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(ctypes.addressof(ctypes.c_char.from_buffer(page))), page

configure, multiply = function(CONFIGURE), function(MULTIPLY)
tiles = struct.pack("<BB14x16H16B", 1, 0, *[64] * 3, *[0] * 13, *[16] * 3, *[0] * 13)

def work():
    for _round in range(3):
        configure[0](tiles)
        time.sleep(0.01)
        multiply[0](None)

threads = [threading.Thread(target=work) for _number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def has_working_tiles(program: str = TILE_PROGRAM) -> bool:
    """Return whether a child process can multiply with tiles."""
    try:
        commands.run([sys.executable, "-c", program], MAX_PROGRAM_SECONDS)
    except commands.CommandError:
        return False
    return True


def has_faulty_header(root: Path, ask: commands.Ask) -> bool:
    """Return whether the host's compiler has the faulty header."""
    header_path = ask(["c++", f"-print-file-name={TILE_HEADER}"]).strip()
    return FAULTY_OPERAND in text_of(root / header_path.lstrip("/"))


def is_unusable(cpu_flags: Collection[str], root: Path = commands.ROOT, ask: commands.Ask = commands.output) -> bool:
    """Return whether the processor announces AMX but programs cannot use it."""
    return set(cpu_flags) >= AMX_FLAGS and (has_faulty_header(root, ask) or not has_working_tiles())
