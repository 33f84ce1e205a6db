"""What the demo costs beyond the compiler: a bare cmake build against the first and the second `make demo`, and against a demo that gets the same
programs as an archive from a server that plays GitHub's releases, in one run.

Works in a temporary folder with a fresh clone, an empty HOME and empty caches, as the current user, on other ports than
the demo's. The demo with an archive has a HOME of its own, and the clone's virtual environment. Prints one JSON object; the figures in README.md come from it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from hub import Hub  # noqa: E402  # the line before adds its folder

BUILD = 11300
"""Number of the archive: about that of the tree which llama-cpp-python 0.3.36 packs."""
PORTS = {
    "llama_server_port": 18081,
    "llama_worker_endpoints": [{"name": "one", "port": 21062}, {"name": "two", "port": 21063}],
}


def seconds(argv: list[str], folder: Path, environment: dict[str, str], log: Path) -> float:
    started = time.monotonic()
    with log.open("ab") as stream:
        subprocess.run(argv, cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=True)
    return round(time.monotonic() - started, 1)


def bare_build(work: Path, plan: dict, environment: dict[str, str], log: Path) -> float:
    """The same tree, options and programs as the plan's, with cmake alone."""
    build = plan["hosts"]["localhost"]["builds"][0]
    archive = next((work / "home" / ".cache" / "llamacpp" / "sources").glob("*.tar.gz"))
    tree = work / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tree, "--strip-components=3", plan["release"]["member"]], check=True)
    options = [f"-D{name}={value}" for name, value in build["cmake_options"].items()]
    configure = seconds(
        ["cmake", "-S", str(tree), "-B", str(work / "bare"), "-G", "Ninja", *options], work, environment, log
    )
    compiled = seconds(["cmake", "--build", str(work / "bare"), "--target", *build["targets"]], work, environment, log)
    return round(configure + compiled, 1)


def from_an_archive(
    work: Path, programs: Path, clone: Path, arguments: str, environment: dict[str, str], log: Path
) -> float:
    """The first demo with programs that were compiled before, from an archive with upstream's name and layout."""
    home, served = work / "archive-home", work / "hub" / "plain" / f"b{BUILD}"
    for folder in (home, served):
        folder.mkdir(parents=True)
    system = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
    with tarfile.open(served / f"llama-b{BUILD}-bin-ubuntu-{system}.tar.gz", "w:gz") as archive:
        archive.add(programs, f"llama-b{BUILD}")
    hub = Hub(work / "hub").start()
    release = {"source": "prebuilt", "build": BUILD, "url": f"{hub.url}/ggml-org/llama.cpp/releases/download"}
    (work / "release.json").write_text(json.dumps({"llama_release": release}))
    arguments, environment = f"{arguments} -e @{work / 'release.json'}", {**environment, "HOME": str(home)}
    try:
        return seconds(["make", "demo", f"ARGS={arguments}"], clone, environment, log)
    finally:
        down(clone, arguments, environment)
        hub.stop()


def down(clone: Path, arguments: str, environment: dict[str, str]) -> None:
    subprocess.run(["make", "down", f"ARGS={arguments}"], cwd=clone, env=environment, capture_output=True, check=False)


def machine() -> str:
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{os.cpu_count()} cores of {cpu}, {platform.freedesktop_os_release()['PRETTY_NAME']}"


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-"))
    log = work / "log"
    clone, home = work / "clone", work / "home"
    home.mkdir()
    arguments = f"-e llama_host_scope=user -e @{work / 'ports.json'} -e llama_plan_path={work / 'plan.json'}"
    (work / "ports.json").write_text(json.dumps(PORTS))
    environment = {**os.environ, "HOME": str(home), "CCACHE_DIR": str(work / "ccache")}
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        environment.pop(name, None)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    try:
        first = seconds(["make", "demo", f"ARGS={arguments}"], clone, environment, log)
        second = seconds(["make", "demo", f"ARGS={arguments}"], clone, environment, log)
        assert "changed=0" in log.read_text().rsplit("PLAY RECAP", 1)[1]
        plan = json.loads((work / "plan.json").read_text())
        bare = bare_build(work, plan, environment, log)
        host = plan["hosts"]["localhost"]
        shutil.copytree(Path(host["prefix"], "releases", host["builds"][0]["id"], "bin"), work / "programs")
    finally:
        down(clone, arguments, environment)
    archive = from_an_archive(work, work / "programs", clone, arguments, environment, log)
    print(
        json.dumps(
            {
                "machine": machine(),
                "bare_build_s": bare,
                "first_demo_s": first,
                "first_demo_beyond_build_s": round(first - bare, 1),
                "second_demo_s": second,
                "first_demo_from_archive_s": archive,
            }
        )
    )
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
