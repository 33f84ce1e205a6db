# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a source archive, compiled programs, a distribution's package or a release of another host to an installed release.

Everything in the folder of a build is done by an ordinary account, reading its results included: root opens no path that
this account could have turned into a link. A release appears under its final name only when it is complete, and an
interrupted build continues where it stopped.
"""

from __future__ import annotations

import gzip
import json
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import SEARCH, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256, sync, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives, smoke_test, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    fast_load,
    options,
)

LOG_LINES_SHOWN = 15
OWN_PATCH_REMEDY = (
    "of llama_build_fast_load does not apply to this tree: remove llama_build_fast_load, or use another release"
)
OPERATORS_PATCH_REMEDY = "of llama_release does not apply: correct it for this tree, or remove it"
PATCH_LINES_SHOWN = 6
COMMIT_DIGITS = 8
NEVER_USED = (0, 0)
"""Time of a release's folder until it is put to use: then it is the time of that."""
FULL_BYTES = 1 << 20
"""A disk with less room is full: not every program says so when it could not write."""
HELP_SECONDS, HELP_BYTES, WRITTEN_BYTES = 60, 1 << 20, 64 << 20
"""How long a program may take for its help, how much of it is read, and how much it may write into one file."""
REMOVE = "remove that release from the controller's cache (docs/security.md says where) and run the playbook again"
LOCK_SECONDS, LOCK_POLL_SECONDS = 3600, 1
"""How long another process may have the lock of a build without a line in its log. One file for a GPU compiles for minutes."""
END_SECONDS = 10
LINK_LEADS_OUT = "Cannot hard link to|Hard-link target '.*' does not exist"
"""What GNU's and BSD's tar report of a hard link to something that was not unpacked."""
STEP_LINES = r"^(\[[0-9]+/[0-9]+\]|== )"
"""Lines of a build's log that show its progress, as an expression for grep -E: ninja's and our own."""


def _bound_files() -> None:
    """Ends a program that writes without end: it is asked for its help alone, and may write caches of graphics drivers."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if limit == resource.RLIM_INFINITY or limit > WRITTEN_BYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN_BYTES, WRITTEN_BYTES))


class BuildError(Exception):
    """A step failed; the message says which, where its log is, and how it ended."""


def _expect(path: Path, digest: str) -> None:
    if sha256(path) != digest:
        raise BuildError(f"{path} does not have the sha256 {digest}: remove that file and run the playbook again")


def _processes(numbers: list[int]) -> str:
    return f"process {', '.join(map(str, numbers))}" if numbers else "another process"


def _boot() -> str:
    """What is another after each start of the system."""
    return (
        text_of(Path("/proc/sys/kernel/random/boot_id")).strip()
        or output(["sysctl", "-n", "kern.bootsessionuuid"]).strip()
    )


def _processes_of(uid: int) -> list[int]:
    """Processes of an account on this host itself, containers aside (Linux; none elsewhere)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = os.readlink(process / "ns" / "pid") == os.readlink("/proc/self/ns/pid")
            if own and f"\nUid:\t{uid}\t" in (process / "status").read_text():
                found.append(int(process.name))
    return found


def end_builds(account: str, cache: str) -> None:
    """Ends what the building account still runs: a killed run leaves its compilers. What waits for them ends as well."""
    uid = pwd.getpwnam(account).pw_uid
    identities = [path.name[: -len(".lock")] for path in Path(cache, "builds").glob("*.lock")]
    deadline = time.monotonic() + END_SECONDS
    while (left := _processes_of(uid)) or any(store.under_way(cache, identity) for identity in identities):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            if left:
                raise BuildError(
                    f"{_processes(left)} of the account {account} does not end: end it, or start the host again, and run the playbook again"
                )
            return
        time.sleep(0.1)


def pack(prefix: str, cache: str, build: dict) -> str:
    """Packs an installed release; returns the path of the archive, which has the same bytes at any time: two runs do not disturb each other."""
    release = Path(prefix) / "releases" / build["id"]
    target = store.packed_path(cache, build["id"])
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            open(target + store.PARTIAL, "wb") as file,
            gzip.GzipFile("", "wb", 1, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for name in [store.MANIFEST, *(f"bin/{target}" for target in build["targets"])]:
                archive.add(release / name, name)
        os.replace(target + store.PARTIAL, target)
    except OSError:
        Path(target + store.PARTIAL).unlink(missing_ok=True)
        raise
    return target


RECEIVED: dict[str, Any] = {"source": {}, "seconds": validation.Number(), "options_ignored": [validation.Text(r"\w+")]}
"""What is kept of the manifest of another host, which may have written anything there."""


class Installer:
    """Puts programs of a build under the final name of its release.

    :param build: the build as planned: ``id``, ``builder``, ``cmake_options``, ``environment``, ``targets``, ``packaged``.
    :param account: who runs what is not trusted; None is the current account.
    """

    def __init__(self, prefix: str, build: dict, account: str | None) -> None:
        self.release = Path(prefix) / "releases" / build["id"]
        self.build = build
        self.account = pwd.getpwnam(account) if account else None

    def _as_account(self) -> dict[str, Any]:
        if self.account and os.geteuid() == 0:
            return {"user": self.account.pw_uid, "group": self.account.pw_gid, "extra_groups": []}
        return {}

    def link(self, source: dict) -> dict:
        """Installs links to the programs that a distribution's package brought; returns the manifest."""
        for path in self.build["packaged"].values():
            if not os.access(path, os.X_OK):
                raise BuildError(
                    f"the distribution's packages were installed, but {path} is missing: use source: pypi or archive"
                )
        partial = self._begin()
        for name, path in self.build["packaged"].items():
            (partial / "bin" / name).symlink_to(path)
        return self._publish(partial, {"source": source, "seconds": 0, "options_ignored": []})

    def unpack(self, source: dict) -> dict:
        """Installs programs that were compiled elsewhere, from an archive with their libraries; returns the manifest.

        :param source: ``archive`` (path on this host), ``sha256``, ``commit`` and ``number``.
        """
        archive = Path(source["archive"])
        _expect(archive, source["sha256"])
        partial = self._begin()
        try:
            archives.extract(archive, self.build["targets"], partial / "bin")
        except archives.ArchiveError as error:
            raise BuildError(str(error)) from error
        if "llama-server" in self.build["targets"] and "--rpc" not in self._help(partial / "bin" / "llama-server")[0]:
            raise BuildError(
                "llama-server of llama_release's archive does not know --rpc: give an archive that was built with RPC, or use source: git"
            )
        details = {key: value for key, value in source.items() if key != "archive"}
        return self._publish(partial, {"source": details, "seconds": 0, "options_ignored": []})

    def receive(self, archive: str, digest: str, recorded: dict[str, str]) -> dict:
        """Installs a release that another host of the same kind has built; returns the manifest.

        :param digest: sha256 of the archive, as the controller recorded it.
        :param recorded: file → sha256, as the controller recorded them.
        """
        _expect(Path(archive), digest)
        partial = self._begin()
        wanted = {store.MANIFEST, *(f"bin/{target}" for target in self.build["targets"])}
        try:
            with archives.open_archive(Path(archive), of_host=True) as packed:
                for member in packed:
                    if member.name in wanted and member.isfile() and member.size <= archives.LIMIT_BYTES:
                        with (partial / member.name).open("wb") as stream:
                            shutil.copyfileobj(cast(IO[bytes], packed.extractfile(member)), stream)
        except archives.DAMAGED as error:
            raise BuildError(f"{archive} cannot be unpacked ({error}): {REMOVE}") from error
        received = store.installed(partial, self.build["targets"], recorded)
        if not received or received.get("id") != self.build["id"]:
            raise BuildError(f"{archive} does not hold the release {self.build['id']} as it was built: {REMOVE}")
        for target in self.build["targets"]:
            (partial / "bin" / target).chmod(0o755)
        details = {key: received.get(key) for key in RECEIVED}
        problem = validation.problem("manifest", details) or validation.mismatch("manifest", details, RECEIVED)
        if problem:
            raise BuildError(
                f"{archive} has a manifest that {self.build['builder']} did not write as this collection does ({problem.where} {problem.why}): "
                "find out on that host why, since it may be taken over"
            )
        return self._publish(partial, {**details, "received": self.build["builder"]})

    def _begin(self) -> Path:
        partial = self.release.with_name("." + self.release.name)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "bin").mkdir(parents=True)
        return partial

    def _publish(self, partial: Path, details: dict) -> dict:
        listed = self.probe(partial / "bin")
        self._try(partial, listed)
        manifest = {
            "id": self.build["id"],
            "cmake_options": self.build["cmake_options"],
            "options": listed,
            "files": {f"bin/{path.name}": sha256(path) for path in sorted((partial / "bin").iterdir())},
            **details,
        }
        (partial / store.MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        os.utime(partial, NEVER_USED)
        self._clear()
        self._place(partial)
        return manifest

    def _place(self, partial: Path) -> None:
        """Lets a release take its place, so that after a power cut whatever is there is whole. No folder can take the place of another one that
        holds something, and services may start what is there: its files are replaced one by one, the manifest last."""
        sync(partial, *partial.rglob("*"))
        if not self.release.is_dir():
            partial.rename(self.release)
            sync(self.release.parent)
            return
        place = self.release / "bin"
        place.mkdir(exist_ok=True)
        names = sorted(path.name for path in (partial / "bin").iterdir())
        for name in names:
            (partial / "bin" / name).replace(place / name)
        (partial / store.MANIFEST).replace(self.release / store.MANIFEST)
        for path in [path for path in place.iterdir() if path.name not in names and not path.is_dir()]:
            path.unlink()
        sync(place, self.release)
        os.utime(self.release, NEVER_USED)
        shutil.rmtree(partial)

    def _clear(self) -> None:
        """Removes what only a build needs, before its release is in place: nobody would remove it after that."""

    def _try(self, partial: Path, listed: dict[str, dict]) -> None:
        """Tries the programs on this host before any running service stops for them.

        :param listed: see probe.
        """
        folder = partial / "trial"
        folder.mkdir()
        place = smoke_test.Place(folder, self.build.get("environment", {}), self._as_account())
        try:
            words = {target: help_["known"] for target, help_ in listed.items()}
            smoke_test.check(partial / "bin", words, place, self.build.get("tls", False))
        except smoke_test.TrialError as error:
            raise BuildError(str(error)) from error
        finally:
            shutil.rmtree(folder)

    def probe(self, programs: Path) -> dict[str, dict]:
        """Program → the fields of what it lists in its help; fails for a program that does not start."""
        return {target: self._list_options(programs / target)._asdict() for target in self.build["targets"]}

    def _list_options(self, program: Path) -> capabilities.Help:
        """The options of a program's help; none of a program that a signal ended, since its help may be incomplete."""
        text, whole = self._help(program)
        return capabilities.parse_help(text if whole else "")

    def _help(self, program: Path) -> tuple[str, bool]:
        """The help of a program, and whether it ended by itself. It runs in the folder of services: old programs look for their libraries
        in the folder where they are started, and end where their account may not read it."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.run(
                    [str(program), "--help"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=HELP_SECONDS,
                    check=False,
                    cwd="/",
                    env={**os.environ, **self.build["environment"]},
                    preexec_fn=_bound_files,
                    **self._as_account(),
                )
            except OSError as error:
                raise BuildError(f"{program.name} does not run on this host: {error.strerror}") from error
            except subprocess.TimeoutExpired:
                raise BuildError(f"{program.name} does not end its help within {HELP_SECONDS} s on this host") from None
            said = "".join(
                os.pread(file.fileno(), HELP_BYTES, 0).decode("utf-8", "replace") for file in (output, errors)
            )
        if "usage" not in said.lower():
            raise BuildError(f"{program.name} does not run on this host: {said.strip()[-300:] or 'it prints nothing'}")
        return said, process.returncode >= 0


class Builder(Installer):
    """One build from source.

    :param source: ``archive`` (path on this host), ``sha256``, ``member`` (folder in the archive that holds llama.cpp, or ""),
        ``commit``, ``number``, and ``patches``, each with ``name``, ``path`` (on this host) and ``sha256``.
    """

    def __init__(self, prefix: str, cache: str, build: dict, source: dict, account: str | None) -> None:
        super().__init__(prefix, build, account)
        self.cache = Path(cache)
        self.source = source
        self.work = self.cache / "builds" / build["id"]
        self.log = Path(store.log_path(cache, build["id"]))

    def _folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if self.account and path.stat().st_uid != self.account.pw_uid:
            for folder, names, files in os.walk(path):
                for name in [folder, *(os.path.join(folder, entry) for entry in [*names, *files])]:
                    os.chown(name, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)

    def _run_logged(self, step: str, argv: list[str]) -> tuple[int, list[str]]:
        """Runs a step as the building account; returns its status and its output."""
        environment = {
            "PATH": SEARCH,
            "HOME": str(self.work),
            "LC_ALL": "C",
            "CCACHE_DIR": str(self.cache / "ccache"),
            "CCACHE_BASEDIR": str(self.work),
            "CCACHE_NOHASHDIR": "true",
            **self.build["environment"],
        }
        with self.log.open("ab") as log:
            log.write(f"== {step}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.work,
                umask=0o022,
                check=False,
                pass_fds=[self._lock],
                **self._as_account(),
            )
        with self.log.open("rb") as log:
            log.seek(start)
            said = log.read().decode("utf-8", "replace").splitlines()
        if process.returncode and (
            any("No space left on device" in line for line in said[-200:])
            or shutil.disk_usage(self.work).free < FULL_BYTES
        ):
            raise BuildError(
                f"{step} failed: the disk of {self.cache} is full. Free some space and run the playbook again; the build continues where "
                f"it stopped. Log: {self.log}"
            )
        return process.returncode, said

    def _run(self, step: str, argv: list[str]) -> None:
        self._require_success(step, *self._run_logged(step, argv))

    def _require_success(self, step: str, status: int, said: list[str]) -> None:
        if status:
            raise BuildError(
                f"{step} failed with status {status}. Log: {self.log}, which ends in:\n"
                + "\n".join(said[-LOG_LINES_SHOWN:])
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A killed playbook leaves its build running: the next one waits for it here, as long as it goes on."""
        path = self.cache / "builds" / f"{self.build['id']}.lock"
        lock = store.lock(path)
        seen, since = -1, 0.0
        while not lock:
            if seen < 0:
                self._say(f"waiting for {_processes(locks.holders(path))}")
            size = self.log.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()
            elif time.monotonic() - since > LOCK_SECONDS:
                raise BuildError(
                    f"{_processes(locks.holders(path))} on this host has the lock {path}, and {self.log} has not grown for "
                    f"{LOCK_SECONDS // 60} minutes: end it, and run the playbook again"
                )
            time.sleep(LOCK_POLL_SECONDS)
            lock = store.lock(path)
        self._lock = lock.fileno()
        with lock:
            yield

    def _say(self, what: str) -> None:
        """Adds a step to the log, which the action plugin shows."""
        with self.log.open("a") as log:
            log.write(f"== {what}\n")

    def install(self, recorded: dict[str, str] | None = None) -> dict:
        """Builds and installs the release where it is missing, or is not what it has to be (stored.installed); returns the manifest."""
        (self.cache / "builds").mkdir(parents=True, exist_ok=True)
        with self._alone():
            manifest = store.installed(self.release, self.build["targets"], recorded, self.build.get("builder"))
            if manifest:
                return manifest
            started = time.monotonic()
            for folder in (self.cache / "ccache", self.work):
                self._folder(folder)
            self.log.write_bytes(b"")
            self._prepare()
            self._configure()
            jobs = str(os.cpu_count() or 1)
            self._run("compile", ["cmake", "--build", "build", "--parallel", jobs, "--target", *self.build["targets"]])
            return self._install(round(time.monotonic() - started))

    def _clear(self) -> None:
        # A tree that is removed in part must not count as unpacked.
        for ending in (store.UNPACKED, store.CONFIGURED):
            self.log.with_suffix(ending).unlink()
        shutil.rmtree(self.work)

    def _prepare(self) -> None:
        """Unpacks and patches the tree where an interrupted build has not left the same one. After a start of the system what it has left is not
        believed: a power cut may have torn the tree and what was compiled."""
        wanted = [_boot(), self.source["sha256"], *(patch["sha256"] for patch in self.source["patches"])]
        ready = self.log.with_suffix(store.UNPACKED)
        if text_of(ready).splitlines() == wanted and (self.work / "source").exists():
            return
        for ending in (store.UNPACKED, store.CONFIGURED):
            self.log.with_suffix(ending).unlink(missing_ok=True)
        self._unpack()
        for patch in self.source["patches"]:
            self._patch(patch)
        self._write_build_info()
        ready.write_text("\n".join(wanted) + "\n")

    def _unpack(self) -> None:
        archive = Path(self.source["archive"])
        _expect(archive, self.source["sha256"])
        member = self.source["member"]
        depth = len(Path(member).parts) if member else 1
        self._run("clean", ["rm", "-rf", "source"])
        self._run("clean", ["mkdir", "source"])
        status, said = self._run_logged(
            "unpack",
            [
                "tar",
                "-xmf",
                str(archive),
                "-C",
                "source",
                f"--strip-components={depth}",
                "--no-same-owner",
                *([member] if member else []),
            ],
        )
        leads_out = next((line for line in said if re.search(LINK_LEADS_OUT, line)), None)
        if leads_out:
            raise BuildError(
                f"{archive} has a hard link that leads out of {member or 'its first folder'}, the only folder that is unpacked: give an "
                f"archive with the whole tree of llama.cpp. tar says: {leads_out}"
            )
        self._require_success("unpack", status, said)
        if not (self.work / "source" / "CMakeLists.txt").exists():
            raise BuildError(
                f"{archive} has no llama.cpp tree: CMakeLists.txt is missing in {member or 'its first folder'}"
            )

    def _patch(self, patch: dict) -> None:
        _expect(Path(patch["path"]), patch["sha256"])
        status, said = self._run_logged(
            f"patch {patch['name']}", ["patch", "-p1", "-N", "-t", "-d", "source", "-i", patch["path"]]
        )
        if status:
            ours = patch["name"].startswith(fast_load.PREFIX)
            raise BuildError(
                f"the patch {patch['name']} {OWN_PATCH_REMEDY if ours else OPERATORS_PATCH_REMEDY}. No running service was "
                f"touched. Log: {self.log}; patch says:\n" + "\n".join(said[:PATCH_LINES_SHOWN])
            )

    def _write_build_info(self) -> None:
        """Writes number and commit into a tree that asks git for them and takes no option: older llama.cpp, and ik_llama.cpp."""
        marks = {"NUMBER": str(self.source["number"] or 0), "COMMIT": self.source["commit"][:COMMIT_DIGITS]}
        scripts = [part for name, value in marks.items() for part in ("-e", f"s/@BUILD_{name}@/{value}/")]
        template = "source/common/build-info.cpp.in"
        if (self.work / template).is_file():
            self._run("name", ["sed", "-i.before", *scripts, template])

    def _configure(self) -> None:
        options = {
            **self.build["cmake_options"],
            "LLAMA_BUILD_COMMIT": self.source["commit"][:COMMIT_DIGITS],
            "LLAMA_BUILD_NUMBER": str(self.source["number"] or 0),
        }
        settings = json.dumps([options, self.build["environment"]])
        ready = self.log.with_suffix(store.CONFIGURED)
        if not ready.exists() or ready.read_text() != settings:
            # cmake keeps the results of probing the compilers, even where it could not identify them.
            ready.unlink(missing_ok=True)
            self._run("clean", ["rm", "-rf", "build"])
        self._run(
            "configure",
            [
                "cmake",
                "-S",
                "source",
                "-B",
                "build",
                "-G",
                "Ninja",
                *(f"-D{name}={value}" for name, value in sorted(options.items())),
            ],
        )
        ready.write_text(settings)

    def _install(self, seconds: int) -> dict:
        partial = self._begin()
        for target in self.build["targets"]:
            with (partial / "bin" / target).open("wb") as program:
                copied = subprocess.run(
                    ["cat", str(self.work / "build" / "bin" / target)],
                    stdout=program,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                    **self._as_account(),
                )
            if copied.returncode:
                raise BuildError(
                    f"{target} could not be copied to {partial}: {copied.stderr.strip()}. Fix that (is the disk full?) and run the playbook again"
                )
            (partial / "bin" / target).chmod(0o755)
        unknown = re.search(
            r"Manually-specified variables were not used by the project:\n\n((?:    \w+\n)+)",
            self.log.read_text(errors="replace"),
        )
        ours = {"LLAMA_BUILD_NUMBER", "LLAMA_BUILD_COMMIT", *(backends.TLS_OPTIONS if self.build.get("tls") else ())}
        ignored = set(unknown.group(1).split()) - ours if unknown else set()
        details = {
            "source": {
                **{key: value for key, value in self.source.items() if key not in ("archive", "patches")},
                "patches": [patch["sha256"] for patch in self.source["patches"]],
            },
            "seconds": seconds,
            "options_ignored": sorted(ignored),
        }
        return self._publish(partial, details)


def step(line: str) -> str:
    """The progress of a build in words, from the last line of its log that matches STEP_LINES."""
    counted = re.match(r"\[(\d+)/(\d+)\]", line)
    if counted:
        return f"step {counted[1]} of {counted[2]}"
    return validation.printable(line.removeprefix("== ")) or "starting"


class Compared(NamedTuple):
    """The result of comparing planned command lines with the help of the installed programs.

    :param errors: a sentence for each option that a program does not accept.
    :param warnings: what could not be compared.
    """

    errors: list[str]
    warnings: list[str]


def compare(installer: Installer, manifest: dict, services: list[dict], release: dict, host: str) -> Compared:
    """Compares the command lines of planned services with what their programs list.

    :param manifest: of the installed release; one of an older version of this collection has no ``options``.
    :param services: as planned, each with ``process``, the command line of its program.
    :param release: as planned: ``generation``, and ``fork`` where it is one.
    :param host: its name in messages.
    """
    fork = release.get("fork", options.MAINLINE)
    programs = installer.release / "bin"
    planned = [service["process"] for service in services if Path(service["process"][0]).parent == programs]
    known = manifest.get("options") or (installer.probe(programs) if planned else {})
    compared = Compared([], [])
    for argv in planned:
        name = Path(argv[0]).name
        help_of = capabilities.Help(**known[name])
        program = options.SERVER if name == options.SERVER else options.WORKER
        where = f"{name} of the release {installer.build['id']} on {host}"
        if not help_of.known:
            compared.warnings.append(f"{where} lists no options in its help: the planned options were not checked")
            continue
        for problem in capabilities.problems(program, argv[1:], help_of, release["generation"], fork):
            owned = options.owned(program, problem.word)
            sure = owned or fork in options.LISTS_ALL
            (compared.errors if sure else compared.warnings).append(f"{where} {_sentence(problem, owned)}")
    return Compared(*(list(dict.fromkeys(found)) for found in compared))


def _sentence(problem: capabilities.Problem, option: options.Option | None) -> str:
    """What is wrong with an argument, who sets it, and what to do."""
    near = f" (the nearest option that it lists is {problem.near})" if problem.near else ""
    if option is None:
        return f"{problem.why}, which llama_server_extra_args sets{near}: remove it, or give one that its --help lists"
    out = f"leave {option.variable} out, or " if option.optional else ""
    return (
        f"{problem.why}, which {option.variable or 'the plan'} sets{near}: {out}set llama_release to a build that has it, "
        "or use a version of this collection that knows this build"
    )
