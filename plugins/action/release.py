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
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import building, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Job, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_registry, sources

display = Display()

POLL_SECONDS = 5
LIMIT_SECONDS = 6 * 3600
SILENCE_SECONDS = building.LOCK_SECONDS + 600
"""Without a change of its log: the host itself gives up earlier where it waits for another build."""


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
        """Installs a release that its builder compiles, and that other hosts get from the controller as it was recorded there."""
        build, cache = arguments["build"], arguments["cache"]
        builds = build["builder"] == self.host
        prefix = arguments["prefix"] if builds else None
        kept = build_registry.CachedBuild(arguments["cluster"], build["builder"], build["id"], prefix)
        record = kept.record()
        arguments.update(recorded=dict(record.files) if record else {}, compiles=builds)
        result = self.module(arguments)
        if result.get("failed") or self.check_mode:
            return result
        if "manifest" not in result:
            archive = kept.archive()
            if record and archive:
                packed = self._copy(archive, f"{cache}/sources/{archive.name}")
                arguments["received"] = {"path": packed, "sha256": record.sha256}
                result = self.module(arguments)
            elif builds:
                arguments["brought"] = self._bring(arguments["release"], cache)
                result = self._build(arguments)
                record = None
            else:
                raise AnsibleActionFail(
                    f"{build['builder']} should build {build['id']} for this host too, and did not: see the error of that host, or run "
                    "without --limit where that leaves it out"
                )
        if builds and not result.get("failed"):
            if not record:
                kept.record_files(result.get("manifest"))
            if arguments.get("share") and not kept.archive():
                self._keep(kept, arguments)
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

    def _keep(self, kept: build_registry.CachedBuild, arguments: dict) -> None:
        """Brings the packed release to the controller's cache, from where the other hosts of this kind get it."""
        packed = self.module({**arguments, "pack": True})
        with kept.receive() as target:
            result = packed if packed.get("failed") else self.fetch(str(packed.get("path")), str(target))
            if result.get("failed"):
                raise AnsibleActionFail(f"{target.name} could not be brought to the controller: {why(result)}")

    def _build(self, arguments: dict) -> dict:
        """Runs the module in the background and shows its log's last step until it ends."""
        log = store.log_path(arguments["cache"], arguments["build"]["id"])

        def show(seconds: float) -> str:
            last = self._low_level_execute_command(
                f"wc -c < {shlex.quote(log)}; grep -E '{building.STEP_LINES}' {shlex.quote(log)} | tail -n 1 | cut -c 1-60",
                sudoable=True,
            )
            said = str(last.get("stdout", ""))
            where = building.step(said.partition("\n")[2].strip())
            display.display(f"  [{self.host}] {arguments['build']['id']}: {where}, {seconds:.0f} s")
            return said

        lost = f"Run the playbook again; the build continues where it stopped. Log on the host: {log}"
        work = Job(
            "build", arguments["prefix"], LIMIT_SECONDS, SILENCE_SECONDS, itertools.repeat(POLL_SECONDS), show, lost
        )
        return self.background(arguments, work)
