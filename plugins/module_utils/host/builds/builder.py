# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compiles a release from a source archive. An interrupted build resumes; a failed build starts over.

An unprivileged account does all work in a build's folder and passes the programs to root, so root follows no link there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files, locks, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import installer, manifest, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds.manifest import Manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

MAX_LOG_LINES = 15
MAX_PATCH_OUTPUT_LINES = 6
COMMIT_DIGITS = 8
MIN_FREE_BYTES = 1 << 20
"""Free space below which a disk counts as full: not every program reports a failed write."""
LOCK_TIMEOUT_SECONDS = 6 * 3600
"""Time to wait for another build on this host. The action plugin gives up earlier if the log stops growing."""
STEP_LINE_PATTERN = r"^(\[[0-9]+/[0-9]+\]|== )"
"""Extended regular expression for grep: progress lines of ninja and of this module in a build's log."""


class Builder(installer.Installer):
    def __init__(
        self,
        prefix: str,
        cache: str,
        build: BuildPlan,
        release: ReleasePlan,
        source: installer.Source,
        account: str | None,
    ) -> None:
        super().__init__(prefix, build, account)
        self.cache_folder = Path(cache)
        self.source = source
        self.build_number = release.build
        self.member = release.member or ""
        self.work_folder = self.cache_folder / "builds" / build.id
        self.log_path = Path(store.log_path(cache, build.id))
        self.unpacked_file = self.log_path.with_suffix(store.UNPACKED_SUFFIX)

    def _make_folder(self, path: Path) -> None:
        """Create a folder, and give it and its contents to the building account."""
        path.mkdir(parents=True, exist_ok=True)
        uid = commands.run_as_options(self.account).get("user")
        if uid is not None and path.stat().st_uid != uid:
            gid = commands.run_as_options(self.account)["group"]
            commands.run(["chown", "-Rh", f"{uid}:{gid}", str(path)], commands.COMMAND_TIMEOUT_SECONDS)

    def _run_logged(self, step: str, argv: list[str]) -> tuple[int, list[str]]:
        """Run a step as the building account; return its exit status and its last lines."""
        environment = {
            "PATH": commands.SEARCH_PATH,
            "HOME": str(self.work_folder),
            "LC_ALL": "C",
            "CCACHE_DIR": str(self.cache_folder / "ccache"),
            "CCACHE_BASEDIR": str(self.work_folder),
            "CCACHE_NOHASHDIR": "true",
            **self.build.environment,
        }
        self._log_step(step)
        with self.log_path.open("ab") as log:
            start_offset = log.tell()
            result = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.work_folder,
                umask=0o022,
                check=False,
                pass_fds=[self._lock],
                **commands.run_as_options(self.account),
            )
        with self.log_path.open("rb") as log:
            log.seek(start_offset)
            printed_lines = log.read().decode("utf-8", "replace").splitlines()
        is_full = shutil.disk_usage(self.work_folder).free < MIN_FREE_BYTES
        if result.returncode and (is_full or any("No space left on device" in line for line in printed_lines[-200:])):
            raise Refusal(
                f"{step} failed: the disk that holds {self.cache_folder} is full. Free some space and run the playbook again to resume. Log: {self.log_path}"
            )
        return result.returncode, printed_lines

    def _run(self, step: str, argv: list[str]) -> None:
        """Run a step. If it fails, the next run starts over, because a power failure may have damaged the tree, and cmake caches wrong results."""
        status, printed_lines = self._run_logged(step, argv)
        if status:
            self.unpacked_file.unlink(missing_ok=True)
            raise Refusal(
                f"{step} failed with status {status}. Log: {self.log_path}, which ends with:\n"
                + "\n".join(printed_lines[-MAX_LOG_LINES:])
            )

    def _log_step(self, step: str) -> None:
        """Add a step to the log, from which the action plugin reports progress."""
        with self.log_path.open("a") as log:
            log.write(f"== {step}\n")

    def install(self) -> Manifest:
        """Build and install the release if it is missing or damaged. If the playbook is killed, the build continues, and the next playbook waits for it."""
        (self.cache_folder / "builds").mkdir(parents=True, exist_ok=True)
        lock_path = store.lock_path(self.cache_folder)
        if files.is_locked(lock_path):
            self._log_step(f"waiting for {locks.holders_text(lock_path)}")
        with locks.hold(lock_path, LOCK_TIMEOUT_SECONDS) as self._lock:
            current_manifest = manifest.installed_manifest(
                self.release_folder, self.build.targets, self.build.trusted_builders
            )
            return current_manifest or self._build()

    def _build(self) -> Manifest:
        start_time = time.monotonic()
        for folder in (self.cache_folder / "ccache", self.work_folder):
            self._make_folder(folder)
        self.log_path.write_bytes(b"")
        self._prepare_tree()
        self._configure()
        jobs = str(os.cpu_count() or 1)
        self._run("compile", ["cmake", "--build", "build", "--parallel", jobs, "--target", *self.build.targets])
        return self._install_programs(round(time.monotonic() - start_time))

    def _remove_build_files(self) -> None:
        # A partly removed tree must not count as unpacked.
        self.unpacked_file.unlink()
        shutil.rmtree(self.work_folder)

    def _prepare_tree(self) -> None:
        """Unpack and patch the tree, unless an interrupted build has left the same tree."""
        page_digests = [self.source.page.sha256] if self.source.page else []
        digests = [self.source.sha256, *page_digests, *(patch.sha256 for patch in self.source.patches)]
        digest_text = "".join(f"{digest}\n" for digest in digests)
        if text_of(self.unpacked_file) == digest_text and (self.work_folder / "source").exists():
            return
        self.unpacked_file.unlink(missing_ok=True)
        self._unpack()
        for patch in self.source.patches:
            self._patch(patch)
        self._write_build_info()
        self.unpacked_file.write_text(digest_text)

    def _unpack(self) -> None:
        archive_path = Path(self.source.archive)
        installer.check_sha256(archive_path, self.source.sha256)
        depth = len(Path(self.member).parts) if self.member else 1
        self._run("clean", ["rm", "-rf", "source", "build"])
        self._run("clean", ["mkdir", "source"])
        argv = ["tar", "-xmf", str(archive_path), "-C", "source", f"--strip-components={depth}", "--no-same-owner"]
        self._run("unpack", [*argv, *([self.member] if self.member else [])])
        if self.source.page:  # a build embeds the page in this folder instead of downloading one
            installer.check_sha256(Path(self.source.page.path), self.source.page.sha256)
            self._run("unpack", ["mkdir", "-p", "source/tools/ui/dist"])
            self._run("unpack", ["tar", "-xmf", self.source.page.path, "-C", "source/tools/ui/dist", "--no-same-owner"])

    def _patch(self, patch: installer.Patch) -> None:
        installer.check_sha256(Path(patch.path), patch.sha256)
        status, printed_lines = self._run_logged(
            f"patch {patch.name}", ["patch", "-p1", "-N", "-t", "-d", "source", "-i", patch.path]
        )
        if status:
            variable = "llama_build_fast_load" if patch.name.startswith(fast_load.PATCH_PREFIX) else "llama_release"
            raise Refusal(
                f"the patch {patch.name} of {variable} does not apply to this source tree: remove the patch, or use another release. No running service was "
                f"touched. Log: {self.log_path}; output of patch:\n" + "\n".join(printed_lines[:MAX_PATCH_OUTPUT_LINES])
            )

    def _write_build_info(self) -> None:
        """Write build number and commit into a tree that otherwise reads them from git, such as the tree of ik_llama.cpp."""
        replacements = {"NUMBER": str(self.build_number or 0), "COMMIT": self.source.commit[:COMMIT_DIGITS]}
        script = [word for name, value in replacements.items() for word in ("-e", f"s/@BUILD_{name}@/{value}/")]
        template = "source/common/build-info.cpp.in"
        if (self.work_folder / template).is_file():
            self._run("set build number", ["sed", "-i.before", *script, template])

    def _configure(self) -> None:
        options = {
            **self.build.cmake_options,
            "LLAMA_BUILD_COMMIT": self.source.commit[:COMMIT_DIGITS],
            "LLAMA_BUILD_NUMBER": str(self.build_number or 0),
        }
        definitions = [f"-D{name}={value}" for name, value in sorted(options.items())]
        self._run("configure", ["cmake", "-S", "source", "-B", "build", "-G", "Ninja", *definitions])

    def _install_programs(self, build_seconds: int) -> Manifest:
        with self._new_release() as partial_folder:
            for target in self.build.targets:
                with (partial_folder / "bin" / target).open("wb") as program:
                    argv = ["cat", str(self.work_folder / "build" / "bin" / target)]
                    run_as_options = commands.run_as_options(self.account)
                    result = subprocess.run(argv, stdout=program, stderr=subprocess.PIPE, check=False, **run_as_options)
                if result.returncode:
                    raise Refusal(f"{target} could not be copied: {result.stderr.decode(errors='replace').strip()}")
                (partial_folder / "bin" / target).chmod(0o755)
            source = {
                "sha256": self.source.sha256,
                "member": self.member,
                "commit": self.source.commit,
                "number": self.build_number,
                "patches": [patch.sha256 for patch in self.source.patches],
            }
            return self._publish(partial_folder, source, build_seconds)


def step_text(line: str) -> str:
    """Describe the progress of a build from the last line of its log that matches STEP_LINE_PATTERN."""
    match = re.match(r"\[(\d+)/(\d+)\]", line)
    if match:
        return f"step {match[1]} of {match[2]}"
    return validation.printable(line.removeprefix("== ")) or "starting"
