# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Known traps that a plan meets. An error that the operator has not accepted by id stops the run."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils import backends, capabilities

LOOPBACK = "127."


def _advisory(identifier: str, severity: str, host: str | None, message: str, remedy: str, reference: str) -> dict:
    return {
        "id": identifier,
        "severity": severity,
        "host": host,
        "message": message,
        "remedy": remedy,
        "reference": reference,
    }


def _security_floor(plan: dict) -> list[dict]:
    builds = sorted({release["generation"] for release in plan["releases"].values()})
    return [
        _advisory(
            "rpc-remote-code-execution",
            "error",
            None,
            f"Build {build} lets whoever reaches a worker's port run code on its host, without authentication.",
            f"Set llama_release to build {capabilities.SECURITY_FLOOR} or newer.",
            "CVE-2026-34159",
        )
        for build in builds
        if build < capabilities.SECURITY_FLOOR
    ]


def _unprotected_workers(plan: dict) -> list[dict]:
    found = []
    for name, host in plan["hosts"].items():
        exposed = [worker["endpoint"] for worker in host["workers"] if not worker["endpoint"].startswith(LOOPBACK)]
        if exposed and host["service_manager"] != "systemd":
            found.append(
                _advisory(
                    "unprotected-worker",
                    "error",
                    name,
                    f"RPC has no authentication, and nothing on this host closes {', '.join(exposed)} to others than the head.",
                    "Let a firewall of your own close the port and accept this advisory, or run the workers as system services of systemd.",
                    "https://github.com/ggml-org/llama.cpp/blob/master/tools/rpc/README.md",
                )
            )
    return found


def _open_server(plan: dict) -> list[dict]:
    head = plan["head"]
    if head["address"].startswith(LOOPBACK) or "--api-key-file" in head["argv"]:
        return []
    return [
        _advisory(
            "open-server",
            "error",
            head["host"],
            f"The server answers everybody who reaches {head['url']}.",
            "Set llama_server_api_key_file, or let it listen on 127.0.0.1 behind a proxy of your own.",
            "https://github.com/ggml-org/llama.cpp/pull/25655",
        )
    ]


def _unused_accelerators(plan: dict) -> list[dict]:
    return [
        _advisory(
            "accelerator-unused",
            "warning",
            name,
            f"{name} has {', '.join(host['unused_accelerators'])}, but llama.cpp is built there for the CPU: no toolchain for it was found.",
            "Install ROCm with hipBLAS, CUDA with cuBLAS, or glslc and the Vulkan headers, or set llama_backend to cpu to say that this is meant.",
            "docs/variables.md",
        )
        for name, host in plan["hosts"].items()
        if host["unused_accelerators"]
    ]


def _unknown_options(plan: dict) -> list[dict]:
    found = []
    for name, host in plan["hosts"].items():
        set_for = {
            (option, plan["releases"][build["release"]]["generation"])
            for build in host["builds"]
            for option in build["cmake_options"]
        }
        for option, generation in sorted(set_for):
            first, last = backends.OPTION_BUILDS.get(option, (0, None))
            if not first <= generation <= (last or generation):
                known = f"up to {last}" if not first else f"{first} to {last}" if last else f"from {first} on"
                found.append(
                    _advisory(
                        "cmake-option-unknown",
                        "warning",
                        name,
                        f"{option} is set for {name}, and build {generation} does not know it: only builds {known} do, so it does nothing.",
                        "Take it out of llama_build_cmake_options, or set llama_release to one of those builds.",
                        "docs/variables.md",
                    )
                )
    return found


CONDITIONS = (_security_floor, _unprotected_workers, _open_server, _unused_accelerators, _unknown_options)


def evaluate(plan: dict) -> list[dict]:
    return [advisory for condition in CONDITIONS for advisory in condition(plan)]
