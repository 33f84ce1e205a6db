"""The build is for the declared device."""

from conftest import PLAN, connect

BUILD = PLAN["hosts"]["worker1"]["builds"][0]
RELEASE = f"{PLAN['hosts']['worker1']['prefix']}/releases/{BUILD['id']}"


def test_the_worker_contains_code_for_the_device():
    assert BUILD["cmake_options"]["GPU_TARGETS"] == "gfx1151"
    (program,) = BUILD["targets"]
    targets = connect("worker1").check_output(
        "grep --text --only-matching 'amdgcn-amd-amdhsa--gfx[0-9a-f]*' %s/bin/%s | sort -u", RELEASE, program
    )
    assert targets.split("\n") == ["amdgcn-amd-amdhsa--gfx1151"]
