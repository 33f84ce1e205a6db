# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copies sources and builds from the controller to hosts, and shows the progress of a build."""

import functools
import itertools
import shlex
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives, builder, installer, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, BackgroundJob, failure_reason
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, chat_page, sources

display = Display()

POLL_SECONDS = 5
BUILD_LIMIT_SECONDS = 6 * 3600
MAX_SILENCE_SECONDS = 70 * 60
"""Longest permitted time without a change in the log. Compiling a single file for a GPU takes minutes."""


class ActionModule(Action):
    ARGUMENTS = installer.ReleaseArguments

    def perform(self, arguments: installer.ReleaseArguments) -> dict:
        if arguments.state == "fetched":
            fetched_files = _fetch_archives(arguments)
            if _embeds_page(arguments):
                fetched_files += chat_page.fetch(arguments.release, fetched_files[0], arguments.build.ui)
            return {"changed": any(file.is_new for file in fetched_files)}
        if arguments.release.source in release_request.COMPILED_SOURCES:
            result = self._install_compiled(arguments)
        else:
            result = self._call_module(arguments)
            if not (result.get("failed") or self.check_mode or "manifest" in result):
                result = self._call_module(arguments._replace(fetched_source=self._transfer_source(arguments)))
        for sentence in result.get("option_warnings", ()):
            display.warning(printable(sentence))
        return result

    def _call_module(self, arguments: installer.ReleaseArguments) -> dict:
        return self.run_module(**typed_json.dump(arguments))

    def _install_compiled(self, arguments: installer.ReleaseArguments) -> dict:
        """Install a release that its builder compiles; other hosts receive it from the controller's cache."""
        build, is_builder = arguments.build, arguments.build.builder == self.host
        cached_build_of = functools.partial(cache.CachedBuild, str(arguments.cluster), build_id=build.id)
        archive_paths = {
            name: path for name in build.trusted_builders if (path := cached_build_of(name).find_archive())
        }
        needs_packing = is_builder and arguments.share and not archive_paths
        if needs_packing:  # only the builder's own build, so each host knows which host compiled its programs
            arguments = arguments._replace(build=build._replace(trusted_builders=(build.builder,)))
        result = self._call_module(arguments)
        if result.get("failed") or self.check_mode:
            return result
        if "manifest" not in result:
            if archive_paths:
                builder_name, archive = next(iter(archive_paths.items()))
                packed_archive = installer.PackedArchive(self.copy_to_tmp(str(archive), archive.name), sha256(archive))
                compiled_build = build._replace(builder=builder_name)
                result = self._call_module(arguments._replace(build=compiled_build, received=packed_archive))
            elif is_builder:
                result = self._build(arguments._replace(fetched_source=self._transfer_source(arguments)))
            else:
                raise AnsibleActionFail(
                    f"{build.builder} has not built {build.id} for this host: fix the error on {build.builder}, or run without --limit if --limit "
                    f"excludes {build.builder}"
                )
        if needs_packing and not result.get("failed"):
            self._fetch_packed_release(cached_build_of(build.builder), arguments)
        return result

    def _transfer_source(self, arguments: installer.ReleaseArguments) -> installer.Source:
        """Copy source and patches to the host; return their paths there and their checksums. Compiled programs are unpacked at once and stay in the
        task's temporary folder: the host's cache may be the same folder as the controller's cache, which retains them."""
        release, source_folder = arguments.release, f"{arguments.cache}/sources"
        first_archive, *other_archives = _fetch_archives(arguments)
        if release.source not in release_request.COMPILED_SOURCES:
            program_archive, *library_archives = (
                installer.PackedArchive(self.copy_to_tmp(str(archive.path), archive.path.name), archive.sha256)
                for archive in (first_archive, *other_archives)
            )
            return installer.Source(*program_archive, first_archive.commit, library_archives=tuple(library_archives))
        patches = [
            installer.Patch(
                name=Path(patch.path).name,
                path=self._copy(Path(patch.path), f"{source_folder}/{patch.sha256[:16]}.patch"),
                sha256=patch.sha256,
            )
            for patch in release.patches
        ]
        archive_path = self._copy(first_archive.path, f"{source_folder}/{first_archive.path.name}")
        source = installer.Source(archive_path, first_archive.sha256, first_archive.commit, tuple(patches))
        for page in chat_page.cached_pages(first_archive) if _embeds_page(arguments) else ():
            page_path = self._copy(page.path, f"{source_folder}/{page.path.name}")
            source = source._replace(page=installer.PackedArchive(page_path, page.sha256))
        return source

    def _copy(self, source_path: Path, target: str) -> str:
        result = self.copy(str(source_path), target)
        if result.get("failed"):
            raise AnsibleActionFail(f"{source_path.name} could not be copied to {target}: {failure_reason(result)}")
        return target

    def _fetch_packed_release(self, cached_build: cache.CachedBuild, arguments: installer.ReleaseArguments) -> None:
        """Add the packed release to the controller's cache, from which the other hosts of this kind receive it."""
        pack_result = self._call_module(arguments._replace(pack=True))
        with cached_build.receive() as target:
            result = pack_result if pack_result.get("failed") else self.fetch(str(pack_result.get("path")), str(target))
            if result.get("failed"):
                raise AnsibleActionFail(
                    f"{target.name} could not be fetched to the controller: {failure_reason(result)}"
                )

    def _build(self, arguments: installer.ReleaseArguments) -> dict:
        """Run the module in the background, and show the last step in its log until it finishes."""
        log_path = store.log_path(arguments.cache, arguments.build.id)

        def show_step(elapsed_seconds: float) -> str:
            result = self._low_level_execute_command(
                f"wc -c < {shlex.quote(log_path)}; grep -E '{builder.STEP_LINE_PATTERN}' {shlex.quote(log_path)} | tail -n 1 | cut -c 1-60",
                sudoable=True,
            )
            progress_text = str(result.get("stdout", ""))
            step = builder.step_text(progress_text.partition("\n")[2].strip())
            display.display(f"  [{self.host}] {arguments.build.id}: {step}, {elapsed_seconds:.0f} s")
            return progress_text

        remedy = f"Run the playbook again to resume the build. Log on the host: {log_path}"
        pauses = itertools.repeat(POLL_SECONDS)
        job = BackgroundJob("build", BUILD_LIMIT_SECONDS, MAX_SILENCE_SECONDS, pauses, show_step, remedy)
        return self.run_in_background(job, **typed_json.dump(arguments))


def _embeds_page(arguments: installer.ReleaseArguments) -> bool:
    """Return whether a build embeds the chat page from its sources; ik_llama.cpp's tree contains its own."""
    release, ui = arguments.release, arguments.build.ui
    return release.source in release_request.COMPILED_SOURCES and release.mainline and ui in ("auto", "true")


def _fetch_archives(arguments: installer.ReleaseArguments) -> list[sources.CachedArchive]:
    """Fetch the archives that a host needs into the controller's cache, and return them; none for a distribution's package."""
    release, build = arguments.release, arguments.build
    if release.source == "package":
        return []
    cached_archives = sources.fetch(release, build.archives or ())
    if release.source in release_request.COMPILED_SOURCES:
        archives.check_sources(cached_archives[0].path, release.member or "")
    else:
        archives.folder_of_programs(cached_archives[0].path, build.targets)
    return cached_archives
