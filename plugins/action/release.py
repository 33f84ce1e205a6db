# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings sources and builds to hosts from the controller, and shows how far a build is."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import builder, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Job, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_cache, sources

display = Display()

POLL_SECONDS = 5
LIMIT_SECONDS = 6 * 3600
SILENCE_SECONDS = 70 * 60
"""Without a change of its log. One file for a GPU compiles for minutes."""


class ActionModule(Action):
    def perform(self, arguments: dict) -> dict:
        release = arguments["release"]
        if release["source"] in release_request.COMPILED:
            return self._compiled(arguments)
        result = self.module(arguments)
        if result.get("failed") or self.check_mode or "manifest" in result:
            return result
        arguments["brought"] = self._bring(release, arguments["cache"])
        return self.module(arguments)

    def _compiled(self, arguments: dict) -> dict:
        """Installs a release that its builder compiles, and that other hosts get from the controller's cache."""
        build, cache = arguments["build"], arguments["cache"]
        is_builder = build["builder"] == self.host
        cached = build_cache.CachedBuild(arguments["cluster"], build["builder"], build["id"])
        result = self.module(arguments)
        if result.get("failed") or self.check_mode:
            return result
        if "manifest" not in result:
            archive = cached.archive()
            if archive:
                path = self._copy(archive, f"{cache}/sources/{archive.name}")
                arguments["received"] = {"path": path, "sha256": sha256(archive)}
                result = self.module(arguments)
            elif is_builder:
                arguments["brought"] = self._bring(arguments["release"], cache)
                result = self._build(arguments)
            else:
                raise AnsibleActionFail(
                    f"{build['builder']} should build {build['id']} for this host too, and did not: see the error of that host, or run "
                    "without --limit where that leaves it out"
                )
        if is_builder and arguments.get("share") and not result.get("failed") and not cached.archive():
            self._fetch_packed(cached, arguments)
        return result

    def _bring(self, release: dict, cache: str) -> dict:
        """Copies source and patches to the host; returns their paths there and their checksums."""
        fetched = sources.fetch(release)
        return {
            "archive": self._copy(fetched.path, f"{cache}/sources/{fetched.path.name}"),
            "sha256": fetched.sha256,
            "commit": fetched.commit,
            "patches": [
                {
                    "name": Path(patch["path"]).name,
                    "path": self._copy(Path(patch["path"]), f"{cache}/sources/{patch['sha256'][:16]}.patch"),
                    "sha256": patch["sha256"],
                }
                for patch in release.get("patches", [])
            ],
        }

    def _copy(self, source: Path, target: str) -> str:
        result = self.copy(str(source), target)
        if result.get("failed"):
            raise AnsibleActionFail(f"{source.name} could not be copied to {target}: {why(result)}")
        return target

    def _fetch_packed(self, cached: build_cache.CachedBuild, arguments: dict) -> None:
        """Brings the packed release to the controller's cache, from where the other hosts of this kind get it."""
        packed = self.module({**arguments, "pack": True})
        with cached.receive() as target:
            result = packed if packed.get("failed") else self.fetch(str(packed.get("path")), str(target))
            if result.get("failed"):
                raise AnsibleActionFail(f"{target.name} could not be brought to the controller: {why(result)}")

    def _build(self, arguments: dict) -> dict:
        """Runs the module in the background and shows its log's last step until it ends."""
        log = store.log_path(arguments["cache"], arguments["build"]["id"])

        def show(seconds: float) -> str:
            last = self._low_level_execute_command(
                f"wc -c < {shlex.quote(log)}; grep -E '{builder.STEP_LINES}' {shlex.quote(log)} | tail -n 1 | cut -c 1-60",
                sudoable=True,
            )
            printed = str(last.get("stdout", ""))
            step = builder.step(printed.partition("\n")[2].strip())
            display.display(f"  [{self.host}] {arguments['build']['id']}: {step}, {seconds:.0f} s")
            return printed

        lost = f"Run the playbook again; the build continues where it stopped. Log on the host: {log}"
        work = Job(
            "build", arguments["prefix"], LIMIT_SECONDS, SILENCE_SECONDS, itertools.repeat(POLL_SECONDS), show, lost
        )
        return self.background(arguments, work)
