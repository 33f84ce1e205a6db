"""Drives the playbooks through ansible-runner against real llama.cpp, apart from whatever else the machine runs.

The cluster of these tests belongs to the current user, lives in a temporary folder and has ports of its own. Only the
caches are the user's.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import ansible_runner
import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / ".venv" / "collections"


def free_port():
    """One that stays free: below those that the kernel gives to clients and to listeners without a number of their own."""
    while True:
        port = 10000 + secrets.randbelow(20000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


PORTS = (free_port(), free_port())
SERVER_PORT = free_port()
RESULTS = {"llama_plan_path", "llama_verify_path"}
"""Variables of files that a run leaves on the controller, which change no host."""


class Cluster:
    """One inventory, and the playbooks run on it."""

    def __init__(self, folder, environment=None, **variables):
        self.folder = folder
        self.as_planned = False
        """Whether the last run of site.yml that could change something applied the inventory alone."""
        self.prefix = folder / "data" / "llamacpp"
        self.url = f"http://127.0.0.1:{SERVER_PORT}"
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_DATA_HOME": str(folder / "data"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": str(folder / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            **(environment or {}),
        }
        self.inventory = folder / "inventory.yml"
        hosts = {"localhost": None}
        self.inventory.write_text(
            yaml.safe_dump(
                {
                    "llama_cluster": {
                        "children": {"llama_head": {"hosts": hosts}, "llama_workers": {"hosts": dict(hosts)}},
                        "vars": {
                            "ansible_connection": "local",
                            "ansible_python_interpreter": sys.executable,
                            "ansible_remote_tmp": str(folder / "ansible" / "tmp"),
                            "ansible_async_dir": str(folder / "ansible" / "async"),
                            "llama_host_scope": "user",
                            "llama_model_known_answer": {},
                            "llama_server_port": SERVER_PORT,
                            "llama_worker_endpoints": [
                                {"name": "one", "port": PORTS[0]},
                                {"name": "two", "port": PORTS[1]},
                            ],
                            **variables,
                        },
                    }
                }
            )
        )

    def run(self, playbook, *arguments, **extra):
        """Runs a playbook; extra variables by name. Returns ansible-runner's result with ``text`` and ``changed``."""
        work = self.folder / "runner"
        work.mkdir()
        result = ansible_runner.run(
            private_data_dir=str(work),
            project_dir=str(ROOT),
            playbook=playbook,
            inventory=str(self.inventory),
            envvars=self.environment,
            extravars=extra,
            cmdline=" ".join(arguments) or None,
            quiet=True,
        )
        result.text = result.stdout.read()
        result.changed = sum((result.stats or {}).get("changed", {}).values())
        shutil.rmtree(work)
        return result

    def site(self, *arguments, **extra):
        result = self.run("site.yml", *arguments, **extra)
        if not arguments:
            self.as_planned = extra.keys() <= RESULTS and result.status == "successful"
        return result

    def complete(self, seconds=30):
        """What it answers; how fast is no matter of these tests."""
        body = json.dumps({"prompt": "", "temperature": 0}).encode()
        request = urllib.request.Request(
            self.url + "/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return json.load(reply)["choices"][0]["text"]

    def processes(self):
        """Process → argv of all that belongs to this installation."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    argv = (entry / "cmdline").read_bytes().decode().split("\0")[:-1]
                    if (entry / "ns" / "pid").readlink() != Path("/proc/self/ns/pid").readlink():
                        continue
                except OSError:
                    continue
                if any(str(self.prefix) in word for word in argv):
                    found[int(entry.name)] = argv
        return found

    def clear(self):
        """Removes whatever the tests left."""
        if self.prefix.exists():
            self.run("playbooks/teardown.yml")
        for pid in self.processes():
            subprocess.run(["kill", "-9", str(pid)], check=False)

    def pid_of(self, *words):
        return next(pid for pid, argv in self.processes().items() if all(word in " ".join(argv[:8]) for word in words))


def known_by(program):
    """The options that the help of a program lists."""
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return capabilities.parse_help(said.stdout + said.stderr)


def until(condition, seconds=120):
    """Waits for a condition; how long it takes is no matter of these tests."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            found = condition()
            if found:
                return found
        except (OSError, StopIteration):
            pass
        time.sleep(0.5)
    raise AssertionError("it did not happen in time")


@pytest.fixture(scope="session", autouse=True)
def compiler_cache():
    """What `make demo` has compiled as root, a user of this machine need not compile."""
    demo, ours = Path("/var/cache/llamacpp/ccache"), Path.home() / ".cache" / "llamacpp" / "ccache"
    if os.access(demo, os.R_OK) and not ours.exists():
        shutil.copytree(demo, ours, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that nothing has been done to yet."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.clear()


@pytest.fixture
def served(cluster):
    """The cluster as its inventory describes it, up and answering, whatever another test left."""
    if not cluster.as_planned or not any("llama-server" in argv[0] for argv in cluster.processes().values()):
        result = cluster.site()
        assert result.status == "successful", result.text
    return cluster


@pytest.fixture(scope="module")
def programs(cluster):
    """Folder with the programs of the release that the cluster of these tests runs."""
    if not list(cluster.prefix.glob("releases/*/bin/llama-server")):
        assert cluster.site().status == "successful"
    return next(cluster.prefix.glob("releases/*/bin/llama-server")).parent


@pytest.fixture(scope="module")
def workers(programs):
    """Endpoints of three workers that lend the processor."""
    ports = [free_port() for _worker in range(3)]
    program, quiet = programs / capabilities.WORKER_BINARIES["llama.cpp"], subprocess.DEVNULL
    argvs = [[program, "-H", "127.0.0.1", "-p", str(port), "-d", "CPU", "-t", "1"] for port in ports]
    started = [subprocess.Popen(argv, stdout=quiet, stderr=quiet) for argv in argvs]
    for port in ports:
        until(lambda port=port: socket.create_connection(("127.0.0.1", port), 1).close() or True)
    yield [f"127.0.0.1:{port}" for port in ports]
    for process in started:
        process.kill()
        process.wait()
