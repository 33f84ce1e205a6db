# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether programs may use the tiles of Intel's AMX, which a processor may announce where the kernel or the hypervisor does not let them.

llama.cpp asks the kernel for permission (ggml_amx_init) and uses plain vectors where it is refused. Some virtual machines grant it, and the
first tile instruction ends the program with SIGILL all the same. So another process does here what llama.cpp does: it asks, configures tiles
in another thread, and multiplies with them after other threads have run.

Some versions of GCC compile llama.cpp's tiles wrongly (12.2 does, 13.3 was seen to be right). Their header says that ldtilecfg reads eight bytes of the
configuration, so the optimiser drops what is written to the others, and llama-server ends with SIGSEGV (GCC bug 114098).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

ANNOUNCED = {"amx_tile", "amx_int8"}
"""Flags of /proc/cpuinfo of a processor for which llama.cpp is compiled with AMX."""
SECONDS = 20
HEADER, WRONG_OPERAND = "include/amxtileintrin.h", "(const void **)__config"
"""The compiler's header for tiles, and what a wrong one has in it."""

PROGRAM = """
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


def work(program: str = PROGRAM) -> bool:
    """Whether a process of its own can multiply with tiles to the end."""
    try:
        commands.run([sys.executable, "-c", program], SECONDS)
    except commands.CommandError:
        return False
    return True


def compiled_wrongly(root: Path, ask: commands.Ask) -> bool:
    """Whether the host's compiler has the wrong header."""
    header = ask(["c++", f"-print-file-name={HEADER}"]).strip()
    return WRONG_OPERAND in text_of(root / header.lstrip("/"))


def unusable(flags: Collection[str], root: Path = commands.ROOT, ask: commands.Ask = commands.output) -> bool:
    """Whether the processor announces AMX and programs cannot use it.

    :param flags: what /proc/cpuinfo says of the processor.
    """
    return set(flags) >= ANNOUNCED and (compiled_wrongly(root, ask) or not work())
