"""Changes of what a cluster runs: those that fail leave alone what serves, and each has a way back."""

import os
import re
import shutil
import subprocess
import tarfile

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import waiting
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache
from conftest import ROOT, free_port

PATCH = """--- a/tools/rpc/rpc-server.cpp
+++ b/tools/rpc/rpc-server.cpp
@@ -1,2 +1,2 @@
-no such line
+another
 neither is this
"""


def test_a_patch_that_does_not_apply_leaves_alone_what_serves(served):
    (served.folder / "fix.patch").write_text(PATCH)
    running = set(served.processes())
    release = {**inventory.specification()["llama_release"]["default"], "patches": ["fix.patch"]}
    result = served.site(llama_release=release)
    assert result.status == "failed"
    assert "the patch fix.patch of llama_release does not apply" in result.text
    assert "Hunk #1 FAILED" in result.text
    assert set(served.processes()) == running
    assert served.complete() == known_answer.SENTENCE


def test_old_releases_go_and_one_that_is_used_stays(served):
    releases = served.prefix / "releases"
    (planned,) = releases.iterdir()
    for age, name in enumerate(("used", "second", "third", "fourth"), start=1):
        shutil.copytree(planned, releases / name)
        os.utime(releases / name, (1e9 - age, 1e9 - age))
    port = free_port()
    before = set(served.processes())
    worker = subprocess.Popen(
        [releases / "used" / "bin" / "ggml-rpc-server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        check = served.site("--check --diff")
        assert check.status == "successful", check.text
        assert "-second" in check.text
        assert len(list(releases.iterdir())) == 5
        for _attempt in range(5):  # nothing is removed while another test builds
            result = served.site()
            assert result.status == "successful", result.text
            if result.changed:
                break
        assert result.changed == 1
        assert {path.name for path in releases.iterdir()} == {planned.name, "used"}
        assert set(served.processes()) == {*before, worker.pid}
    finally:
        worker.kill()
        worker.wait()
    shutil.rmtree(releases / "used")


def test_an_option_that_the_program_does_not_know_stops_nothing(served):
    before = set(served.processes())
    result = served.site(llama_server_extra_args=["--no-such-option"])
    assert result.status == "failed"
    told = " ".join(result.text.split())
    assert "does not know --no-such-option, which llama_server_extra_args sets" in told
    assert set(served.processes()) == before
    assert served.complete() == known_answer.SENTENCE


def test_a_server_that_ends_at_each_start_is_told_at_once(served):
    """It is gone before anybody sees its process."""
    result = served.site(llama_server_extra_args=["--pooling", "nonsense"], llama_server_start_timeout=86400)
    assert result.status == "failed"
    told = " ".join(result.text.split())
    ends = re.search(r"llama-server exited (\d+) times while verify waited, the last time with status 1", told)
    assert int(ends[1]) >= waiting.MAX_EXITS
    assert "error while handling argument" in told
    back = served.site()
    assert back.status == "successful", back.text
    assert served.complete() == known_answer.SENTENCE


def test_programs_that_are_compiled_already(served):
    """The programs of the build, packed as upstream's archives are."""
    archive = served.folder / "llama-b11063-bin-test.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(next(served.prefix.glob("releases/*/bin")), "llama-b11063")
    checksum = "sha256:" + sha256(archive)
    release = {"source": "binary", "path": str(archive), "checksum": checksum, "build": 11063}
    serves = next(served.prefix.glob("releases/*")).name
    check = served.site("--check --diff", llama_release=release)
    assert check.status == "successful", check.text
    assert f"-{serves}" not in check.text, "the plan that serves is kept, and its release with it"
    result = served.site(llama_release=release)
    assert result.status == "successful", result.text
    assert all(
        f"/releases/binary-{checksum[7:15]}-cpu-" in argv[0] for argv in served.processes().values() if "rpc" in argv[0]
    )
    assert served.complete() == known_answer.SENTENCE
    assert served.site(llama_release=release).changed == 0
    (cache.root_folder() / "sources" / f"{checksum[7:23]}.tar.gz").unlink()
    back = served.site()
    assert back.status == "successful", back.text
    assert "step " not in back.text


def test_an_installed_collection_works_as_the_clone_does(served, tmp_path):
    environment = {**os.environ, **served.environment, "ANSIBLE_COLLECTIONS_PATH": str(tmp_path / "collections")}
    for name in ("ANSIBLE_CONFIG", "PYTHONPATH"):
        environment.pop(name, None)
    run = {"env": environment, "capture_output": True, "text": True}
    built = subprocess.run(
        ["ansible-galaxy", "collection", "build", "--output-path", str(tmp_path), str(ROOT)],
        cwd=tmp_path,
        check=False,
        **run,
    )
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("llamacpp-cluster-*.tar.gz")
    listed = subprocess.run(["tar", "-tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    assert not [name for name in listed.splitlines() if name.startswith((".", "tests"))]
    installed = subprocess.run(
        [
            "ansible-galaxy",
            "collection",
            "install",
            "--offline",
            "--no-deps",
            "-p",
            str(tmp_path / "collections"),
            str(archive),
        ],
        cwd=tmp_path,
        check=False,
        **run,
    )
    assert installed.returncode == 0, installed.stderr
    site = subprocess.run(
        ["ansible-playbook", "llamacpp.cluster.site", "-i", str(served.inventory)], cwd=tmp_path, check=False, **run
    )
    assert site.returncode == 0, site.stdout + site.stderr
    assert "changed=0" in site.stdout
