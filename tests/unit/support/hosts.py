"""Parts of plans of hosts, where a test says what matters to it alone."""

import contextlib
import os
import secrets
import socket
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types

PLACES = {"prefix": "/p", "cache": "/c", "state": "/p/state", "units": "/p/units"}
LISTS = "accounts folders unused_accelerators builds workers firewall port_probes links services"
NOTHING_PLANNED = host_types.HostPlan(
    **{"scope": "user", "service_manager": "supervisor", "tuning": host_types.KernelTuning({}, False), **PLACES},
    **dict.fromkeys(LISTS.split(), ()),
    **dict.fromkeys(("python", "account", "runtime", "firewall_manager", "build_account")),
    **{"tools": {}, "optional_tools": {}, "unit_closes": False, "host_settings": False},
)


def free_port():
    """One that stays free: below those that the kernel gives to clients and to listeners without a number of their own."""
    while True:
        port = 10000 + secrets.randbelow(20000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def host_plan(**changes):
    return NOTHING_PLANNED._replace(**changes)


def build_plan(identity, *targets):
    return host_types.BuildPlan(identity, "r", "cpu", "k", {}, {}, targets, {}, "here", ("here",))


def service_plan(argv, listens, **changes):
    """A worker, or what else ``changes`` say."""
    argv = tuple(map(str, argv))
    planned = host_types.ServicePlan(
        "llamacpp-worker-x", "worker", False, "", argv, argv, {}, listens, (), None, (), (), {}, ()
    )
    return planned._replace(**changes)


def executable(path, text):
    """Writes a program, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write(root, files):
    """Writes files below a folder, each with a last line break, as kernels do.

    :param files: path → text, or a number.
    """
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def tree(root, *left_out):
    """Path → mode and content of each file and link below a folder, without what a killed run leaves beside a file."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path).replace(str(root), "")
        elif path.is_file() and not name.startswith(left_out) and not path.name.startswith(".llamacpp-"):
            found[name] = (path.stat().st_mode & 0o7777, path.read_bytes())
    return found
