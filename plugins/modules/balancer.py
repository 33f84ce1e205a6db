#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: balancer
short_description: Drains a replica in HAProxy, or returns it to service
description:
  - Sends commands to the HAProxy of C(llama_balancer) over its socket. If HAProxy is not running, or does not know O(server), nothing happens.
extends_documentation_fragment: llamacpp.cluster.attributes
options:
  server:
    description: Name of the replica's server in HAProxy.
    type: str
    required: true
  state:
    description:
      - With V(drained), the server receives no new requests, and the module waits until running requests have finished.
      - With V(ready), the server receives requests again, and the module waits until the server passes its health check.
      - With V(read), the module only reads the server's status.
    type: str
    choices: [drained, ready, read]
    default: read
  seconds:
    description: Seconds after which the module stops waiting and fails. With V(0), it neither waits nor fails.
    type: int
    default: 0
  socket:
    description: HAProxy's admin socket.
    type: path
    default: /run/llamacpp-balancer/admin.sock
"""

EXAMPLES = r"""
- name: Drain the replica
  llamacpp.cluster.balancer:
    server: strix0
    state: drained
    seconds: 3600
"""

RETURN = r"""
status:
  description: Status of the server as HAProxy reports it. Empty if HAProxy is not running or does not know the server.
  returned: success
  type: str
request_count:
  description: Number of requests that the server is processing or that are queued for it.
  returned: success
  type: int
"""

import csv
import socket
import time
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors

HAPROXY_BACKEND = "replicas"
POLL_SECONDS = 0.5
HAPROXY_STATES = {"drained": "maint", "ready": "ready"}
"""In state drain, HAProxy would still accept clients that are bound to the server. In state maint, running requests can finish."""
REMEDIES = {
    "drained": "wait for its requests to finish, or stop their clients, then run the playbook again",
    "ready": "check its service and make sure that llama_server_allowed includes the balancer",
}


class ReplicaServer(NamedTuple):
    """The server of a replica, as HAProxy reports it."""

    status: str = ""
    """status in HAProxy's words; empty if HAProxy does not know the server"""
    request_count: int = 0
    """number of running and waiting requests"""
    other_up_count: int = 0
    """number of other servers that are up"""

    @property
    def is_drained(self) -> bool:
        return self.status.startswith(("DRAIN", "MAINT"))


def send_command(socket_path: str, command: str) -> str:
    """Return HAProxy's answer to a command; empty if HAProxy is not running."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        try:
            connection.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            return ""
        connection.sendall(f"{command}\n".encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode(errors="replace")


def read_server(socket_path: str, name: str) -> ReplicaServer:
    reader = csv.DictReader(send_command(socket_path, "show stat -1 4 -1").lstrip("# ").splitlines())
    try:
        row_by_name = {row["svname"]: row for row in reader if row["pxname"] == HAPROXY_BACKEND}
        row = row_by_name.pop(name, None)
        other_up_count = sum(row["status"].startswith("UP") for row in row_by_name.values())
        request_count = int(row["scur"] or 0) + int(row["qcur"] or 0) if row else 0
        return ReplicaServer(row["status"].strip(), request_count, other_up_count) if row else ReplicaServer()
    except (KeyError, ValueError, AttributeError, csv.Error):
        raise errors.Refusal(
            f"{socket_path} does not answer like HAProxy: set the module's socket option to HAProxy's admin socket, then run the playbook again"
        ) from None


def has_reached(server: ReplicaServer, state: str) -> bool:
    return not server.request_count if state == "drained" else server.status.startswith("UP")


def main():
    module = AnsibleModule(
        argument_spec={
            "server": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "ready", "read"], "default": "read"},
            "seconds": {"type": "int", "default": 0},
            "socket": {"type": "path", "default": "/run/llamacpp-balancer/admin.sock"},
        },
        supports_check_mode=True,
    )
    with errors.report_errors(module):
        name, state, socket_path = (module.params[key] for key in ("server", "state", "socket"))
        server = read_server(socket_path, name)
        needs_change = bool(server.status) and state in HAPROXY_STATES
        is_changed = needs_change and server.is_drained != (state == "drained")
        if needs_change and not module.check_mode:
            if state == "drained" and not server.other_up_count:
                module.warn(f"{name} is the only replica that is up: requests will fail until it serves again.")
            command = f"set server {HAPROXY_BACKEND}/{name} state {HAPROXY_STATES[state]}"
            error = send_command(socket_path, command).strip().rstrip(".")
            if error:
                module.fail_json(
                    msg=f"HAProxy did not change the state of {name}: {error}. Run site.yml to write HAProxy's configuration again."
                )
            deadline = time.monotonic() + module.params["seconds"]
            server = read_server(socket_path, name)
            while not has_reached(server, state) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                server = read_server(socket_path, name)
            if not has_reached(server, state) and module.params["seconds"]:
                problem = f"is busy (requests: {server.request_count})" if state == "drained" else f"is {server.status}"
                module.fail_json(msg=f"{name} {problem} after {module.params['seconds']} s: {REMEDIES[state]}.")
        module.exit_json(changed=is_changed, status=server.status, request_count=server.request_count)


if __name__ == "__main__":
    main()
