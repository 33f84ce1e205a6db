"""A builder that was taken over: it changes its programs, and its manifest so that they agree."""

import json
import re
import subprocess

import pytest
from conftest import INVENTORY, PLAN, on

pytestmark = pytest.mark.timeout(900)

BUILDER, OTHER, BUILD = next(
    (build["builder"], name, build)
    for name, host in PLAN["hosts"].items()
    for build in host["builds"]
    if build["builder"] not in (name, PLAN["head"]["host"])
)
FOLDER = f"{PLAN['hosts'][BUILDER]['prefix']}/releases/{BUILD['id']}"
CHANGE = """
import hashlib, json, sys
folder = sys.argv[1]
path = folder + "/manifest.json"
manifest = json.load(open(path))
name = next(name for name in sorted(manifest["files"]) if name.endswith("rpc-server"))
data = open(folder + "/" + name, "rb").read() + b"taken over"
open(folder + "/new", "wb").write(data)
manifest["files"][name] = hashlib.sha256(data).hexdigest()
json.dump(manifest, open(path, "w"))
print(name)
"""


def site():
    playbook = f"{INVENTORY.parents[3]}/playbooks/site.yml"
    given = json.dumps({f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")})
    argv = ["ansible-playbook", playbook, f"--inventory={INVENTORY}", f"--extra-vars={given}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def sums(name):
    return on(name).check_output(f"cd {FOLDER} && find . -type f -name '*rpc-server' -exec sha256sum {{}} + | sort")


def test_a_builder_that_was_taken_over_is_named_and_gives_the_others_nothing():
    before, started = sums(BUILDER), on(OTHER).check_output("pgrep -x -o -f '.*runtime.py worker.*'")
    assert before == sums(OTHER)
    program = on(BUILDER).check_output("python3 -c %s %s", CHANGE, FOLDER)
    on(BUILDER).check_output("cd %s && chmod --reference=%s new && mv new %s", FOLDER, program, program)
    assert sums(BUILDER) != before
    first = site()
    said = re.sub(r"\s+", " ", first.stdout + first.stderr)
    assert first.returncode == 0, said[-5000:]
    assert f"release {BUILD['id']} on {BUILDER} is not the one that the controller recorded of {BUILDER}" in said
    assert sums(BUILDER) == before
    assert sums(OTHER) == before
    assert on(OTHER).check_output("pgrep -x -o -f '.*runtime.py worker.*'") == started
    second = site()
    assert set(re.findall(r"changed=(\d+)", second.stdout)) == {"0"}, second.stdout[-5000:]
