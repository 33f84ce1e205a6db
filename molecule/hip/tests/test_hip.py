"""What was compiled is for the device that was declared."""

from conftest import PLAN, on

BUILD = PLAN["hosts"]["worker1"]["builds"][0]
RELEASE = f"{PLAN['hosts']['worker1']['prefix']}/releases/{BUILD['id']}"


def test_the_worker_holds_code_for_the_device():
    assert BUILD["cmake_options"]["GPU_TARGETS"] == "gfx1151"
    (program,) = BUILD["targets"]
    told = on("worker1").check_output(
        "grep --text --only-matching 'amdgcn-amd-amdhsa--gfx[0-9a-f]*' %s/bin/%s | sort -u", RELEASE, program
    )
    assert told.split("\n") == ["amdgcn-amd-amdhsa--gfx1151"]
