"""Hosts and plans that the tests of planning and verification start from."""

import copy
import functools
import gc
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema_rs
import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import smoke_test
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import completion, planner
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, inventory
from model_server import serve
from support import launched
from support.models import tensor

ROOT = Path(__file__).resolve().parents[2]
PLAN = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
# Tests import scripts of these folders.
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "benchmarks")]
SCHEMA = jsonschema_rs.validator_for(PLAN)
CATALOGUE = cluster_inputs.make_catalogue(inventory.packages())
RELEASE = {"source": "pypi", "version": "0.3.36", "checksum": "sha256:" + "a" * 64}

FACTS = {
    **{"system": "Linux", "architecture": "x86_64", "memory_mib": 65536, "accelerators": []},
    "distribution": {"id": "debian", "version": "13", "family": "debian"},
    "cpu": {"model": "test", "cores": 16, "features_id": "f"},
    "toolchain": {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0", "ccache": None},
    **{"scope": "system", "python": "/usr/bin/python3", "service_manager": "systemd", "has_unit_filter": True},
    **{"prefix": "/opt/llamacpp", "cache": "/var/cache/llamacpp", "units": "/etc/systemd/system"},
}


def pytest_addoption(parser):
    parser.addoption("--record-plans", action="store_true", help="write tests/unit/data/plans again")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is collected stays until the end: looking for garbage in it, then and later, costs a tenth of the time of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def make(cluster, model, catalogue, runtime_id):
    """The JSON of a plan."""
    resolved = automatic.resolve_release(model_source.with_reports(cluster, model), catalogue)
    return typed_json.dump(planner.make_plan(resolved, catalogue, runtime_id))


def refused(cluster, refusal):
    """The JSON in place of the plan of a cluster that has none."""
    return typed_json.dump(planner.refused_plan(cluster, refusal))


@functools.cache
def defaults():
    """Of the operator's variables."""
    return {variable: option.get("default") for variable, option in inventory.specification().items()}


class Cluster:
    """Builds the input of cluster_inputs.read_cluster; variables and facts are set per host before the plan is made."""

    def __init__(self):
        self.hosts = {}
        self.model = {}

    def add(self, name, *groups, address="192.0.2.1", facts=None, **variables):
        self.hosts[name] = {
            "groups": list(groups),
            "unknown_variables": {},
            "ansible_host": address,
            "facts": {**copy.deepcopy(FACTS), **(facts or {})},
            "variables": {
                **{name: copy.copy(value) for name, value in defaults().items()},
                "llama_release": RELEASE,
                **variables,
            },
        }
        return self

    def set(self, name, **variables):
        """Changes variables of a host."""
        self.hosts[name]["variables"].update(variables)

    def plan(self, schema=SCHEMA):
        try:
            hosts = cluster_inputs.checked_hosts("llama_cluster", self.hosts)
            plan = make(cluster_inputs.read_cluster("llama_cluster", hosts), self.model, CATALOGUE, "runtime-id")
        except Refusal as refusal:
            plan = refused("llama_cluster", refusal)
        if schema:
            schema.validate(plan)
        return plan

    def accepted(self):
        """The plan, which is not refused."""
        plan = self.plan()
        assert not plan["refused"], plan["reasons"]
        return plan

    def reason(self, *said):
        """What refuses the plan, in which each of these texts stands."""
        plan = self.plan()
        assert plan["refused"]
        assert not plan["fits"] or plan["advisories"]
        reason = " ".join(plan["reasons"])
        assert [text for text in said if text not in reason] == [], reason
        return reason


def typed(plan):
    """The plan, or what is in its place, that JSON describes."""
    return typed_json.parse(Plan if "hosts" in plan else Refused, plan)


def complete(plan, facts=None):
    """The JSON of a plan with files, definitions and id, as the action plugin completes it."""
    made = completion.complete_plan(
        typed_json.parse(Plan, plan), plan_action.LAUNCHER_FILES, definitions.definition, facts or {}
    )
    return typed_json.dump(made)


def identity(plan):
    """The id of a completed plan's JSON."""
    return completion.compute_plan_id(typed_json.parse(Plan, plan))


def definition(host, service):
    """The definition of a service, from the JSON of its host and its own."""
    return definitions.definition(typed_json.parse(HostPlan, host), typed_json.parse(ServicePlan, service))


def known_answer_of(layers=16, width=128, kind="f32"):
    return {"layers": layers, "width": width, "type": kind}


@pytest.fixture(scope="session")
def generate():
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def untried(monkeypatch):
    """Has programs installed that can do no more than say how they are used."""
    monkeypatch.setattr(smoke_test, "test_programs", lambda *_arguments: None)


@pytest.fixture
def local():
    """One machine as head and as two workers, as in inventories/local."""
    return Cluster().add(
        "here",
        "head",
        "worker",
        llama_model_known_answer=known_answer_of(),
        llama_worker_endpoints=[{"name": "one", "port": 50052}, {"name": "two", "port": 50053}],
    )


@pytest.fixture
def pair():
    """A head and two workers on a network of their own."""
    return (
        Cluster()
        .add("head", "head", address="192.0.2.10", llama_model_known_answer=known_answer_of())
        .add("worker1", "worker", address="192.0.2.11")
        .add("worker2", "worker", address="192.0.2.12")
    )


@pytest.fixture
def big_model():
    """A summary of 80 layers with 1 GiB of weights each."""
    summary = known_answer.summary(80, 128, "f32")
    layer = tensor("blk.*.all.weight", "F32", [1 << 14, 1 << 14], 1 << 30, 80)
    return {
        **summary,
        "name": "big",
        "layer_bytes": [1 << 30] * 80,
        "tensors": [layer, *(row for row in summary["tensors"] if row["layers"] is None)],
        "context": 32768,
    }


@pytest.fixture
def call(request, capsys):
    """Runs the MODULE that a file of tests is about, or another one, as Ansible does; returns what it reports."""

    def run(check=False, module=None, **arguments):
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            (module or request.module.MODULE).main()
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def certify(tmp_path):
    """Makes a certificate for a name; returns its file and that of its key."""

    def openssl(*argv):
        subprocess.run(["openssl", *map(str, argv)], capture_output=True, check=True)

    def make(name, expired=False):
        certificate, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        new = ["req", *curve, "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", certificate]
        if expired:
            openssl(*new)
            openssl("x509", "-req", "-in", certificate, "-signkey", key, "-days", "-1", "-out", certificate)
        else:
            openssl(*new, "-x509", "-days", "2", "-addext", f"subjectAltName=DNS:head.lan,DNS:{name},IP:192.0.2.10")
        return certificate, key

    if not shutil.which("openssl"):
        pytest.skip("openssl is needed to make a certificate")

    return make


@pytest.fixture
def popen():
    """Starts processes that end with the test, and waits until each has a command line: Popen returns a little earlier."""
    started = []

    def start(argv, **options):
        process = subprocess.Popen(argv, **options)
        started.append(process)
        while process.poll() is None and not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def fill_disk(filler, pages):
    """Writes a file until its disk has room for so many pages of 4096 bytes alone."""
    with filler.open("wb", buffering=0) as stream:
        while True:
            try:
                stream.write(bytes(4096))
            except OSError:
                break
        stream.truncate(stream.tell() - stream.tell() % 4096 - 4096 * pages)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a small disk can be made by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def public():
    """A folder that every account may enter; each start of pytest closes those that it makes itself."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def server(monkeypatch):
    """Has a model to fetch."""
    yield from serve(monkeypatch)


other = server
"""A second one."""
cluster = launched.cluster


@pytest.fixture
def models(tmp_path):
    return tmp_path / "models"
