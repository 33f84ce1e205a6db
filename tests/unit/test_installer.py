"""Releases that are not compiled here: programs of an archive, of a package and of another host."""

import json
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives, installer, manifest
from support import builds
from support.hosts import executable
from test_builder import KNOWN_COMPILER, printed_by

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("untried")]

LIBRARY_CMAKE = (
    KNOWN_COMPILER
    + """
project(tiny C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_BUILD_RPATH "$ORIGIN")
add_library(ggml SHARED words.c)
set_target_properties(ggml PROPERTIES VERSION 0.9.4 SOVERSION 0)
add_executable(ggml-rpc-server main.c)
add_executable(llama-server main.c)
target_link_libraries(ggml-rpc-server ggml)
target_link_libraries(llama-server ggml)
"""
)
PROGRAMS = "ggml-rpc-server", "llama-server", "libggml.so", "libggml.so.0", "libggml.so.0.9.4"
FILES = {f"bin/{name}" for name in PROGRAMS}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Programs with a shared library beside them that they find by $ORIGIN, laid out as in upstream's archives."""
    work = tmp_path_factory.mktemp("compiled")
    for name, text in (
        ("CMakeLists.txt", LIBRARY_CMAKE),
        ("words.c", 'const char *words(void) { return "usage: --rpc --fit"; }\n'),
        ("main.c", "#include <stdio.h>\nconst char *words(void);\nint main(void) { puts(words()); return 0; }\n"),
    ):
        (work / name).write_text(text)
    for argv in (["cmake", "-S", ".", "-B", "made"], ["cmake", "--build", "made"]):
        subprocess.run(argv, cwd=work, check=True, capture_output=True)
    folder = work / "llama-b11434"
    (work / "made" / "bin").rename(folder)
    (folder / "README.md").write_text("not needed")
    return folder


@pytest.fixture
def programs(tmp_path, compiled):
    """A copy of them that a test may change."""
    return shutil.copytree(compiled, tmp_path / "programs", symlinks=True)


def unpack(tmp_path, archive, **build):
    planned = builds.BUILD._replace(**build)
    return installer.Installer(str(tmp_path / "prefix"), planned, None).unpack(builds.source_of(archive), 11434)


def release_of(tmp_path, prefix="prefix"):
    return tmp_path / prefix / "releases" / builds.BUILD.id


def pack_folder(tmp_path, folder, prefix="llama-b11434", without=()):
    archive = tmp_path / "programs.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, prefix, filter=lambda member: None if member.name.rsplit("/", 1)[-1] in without else member)
    return archive


@pytest.mark.parametrize("prefix", ["llama-b11434", "build/bin", "."])
def test_compiled_programs_are_installed_with_their_libraries(tmp_path, compiled, prefix):
    archive = pack_folder(tmp_path, compiled, prefix)
    made = unpack(tmp_path, archive)
    release = release_of(tmp_path)
    assert set(made.files) == FILES
    assert printed_by(release) == "usage: --rpc --fit\n"
    assert (release / "bin" / "libggml.so").readlink().name == "libggml.so.0"
    assert made.source == {"sha256": builds.source_of(archive).sha256, "commit": "abc1234def567", "number": 11434}
    assert manifest.installed_manifest(release) == made
    (release / "bin" / "libggml.so.0.9.4").write_text("another library")
    assert manifest.installed_manifest(release) is None


@pytest.mark.parametrize(
    "name, content, reason",
    [
        (
            "ggml-rpc-server",
            None,
            "has no ggml-rpc-server next to llama-server: use an archive with compiled RPC programs",
        ),
        ("llama-server", None, "has no llama-server: use an archive"),
        ("libggml.so.0.9.4", None, "(llama|ggml-rpc)-server does not run on this host"),
        ("ggml-rpc-server", b"\x7fELF" + bytes(60), "ggml-rpc-server does not run on this host: Exec format error"),
    ],
)
def test_an_archive_that_lacks_something_or_is_for_another_processor(tmp_path, programs, name, content, reason):
    (programs / name).write_bytes(content) if content else (programs / name).unlink()
    with pytest.raises(Refusal, match=reason):
        unpack(tmp_path, pack_folder(tmp_path, programs))
    assert not release_of(tmp_path).exists()


def test_an_archive_that_is_none_or_another_than_planned(tmp_path, compiled):
    archive = tmp_path / "programs.tar"
    archive.write_bytes(b"PK\x03\x04")
    with pytest.raises(Refusal, match=r"cannot be read \(.*\): use a complete tar or zip archive"):
        unpack(tmp_path, archive)
    source = builds.source_of(pack_folder(tmp_path, compiled))._replace(sha256="0" * 64)
    with pytest.raises(Refusal, match="does not match the controller's file"):
        installer.Installer(str(tmp_path), builds.BUILD, None).unpack(source, 11434)


def test_libraries_of_another_archive_lie_beside_the_programs(tmp_path, compiled):
    """As those of CUDA, of which upstream has an archive with a folder of its own."""
    (tmp_path / "cudart").mkdir()
    for name in ("libcudart.so.13", "libcublas.so.13", "README"):
        (tmp_path / "cudart" / name).write_text(name)
    folder = "cudart-llama-b11434-bin-ubuntu-cuda-13.4-x64"
    runtime = pack_folder(tmp_path, tmp_path / "cudart", folder).rename(tmp_path / "cudart.tar.gz")
    source = builds.source_of(pack_folder(tmp_path, compiled))
    target = installer.Installer(str(tmp_path / "prefix"), builds.BUILD, None)
    made = target.unpack(source._replace(library_archives=(builds.packed_of(runtime),)), 11434)
    assert set(made.files) == FILES | {"bin/libcudart.so.13", "bin/libcublas.so.13"}


def link(name, kind, target):
    member = tarfile.TarInfo(f"llama-b11434/{name}")
    member.type, member.linkname = kind, target
    return member


def pack_links(tmp_path, compiled, links, without=()):
    archive = pack_folder(tmp_path, compiled, without=without)
    plain = tmp_path / "links.tar"
    with tarfile.open(archive) as source, tarfile.open(plain, "w") as packed:
        for member in source:
            packed.addfile(member, source.extractfile(member) if member.isreg() else None)
        for member in links:
            packed.addfile(member)
    return plain


def zipped(tmp_path, archive):
    """The same files as a zip archive, as zip --symlinks writes it."""
    target = tmp_path / "programs.zip"
    with tarfile.open(archive) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in source:
            info = zipfile.ZipInfo(member.name)
            info.external_attr = (0o120777 if member.issym() else 0o100755) << 16
            if member.isreg() or member.issym():
                packed.writestr(info, member.linkname if member.issym() else source.extractfile(member).read())
    return target


def test_a_zip_archive_is_read_like_one_of_tar(tmp_path, compiled):
    links = [link("libescape.so", tarfile.SYMTYPE, "/etc/passwd"), tarfile.TarInfo("llama-b11434/../../libup.so")]
    archive = zipped(tmp_path, pack_links(tmp_path, compiled, links, ["libggml.so"]))
    assert set(unpack(tmp_path, archive).files) == FILES - {"bin/libggml.so"}
    assert not list(tmp_path.rglob("libup.so"))
    content = archive.read_bytes()
    for damaged in (
        content[:-30],
        content[:400],
        content[:300] + bytes(9) + content[309:],
        content.replace(b"PK\1\2", b"PK\1\3"),
    ):
        archive.write_bytes(damaged)
        with pytest.raises(Refusal, match="cannot be read"):
            unpack(tmp_path, archive)


def test_the_directory_of_a_zip_archive_is_limited(tmp_path, compiled, monkeypatch):
    archive = zipped(tmp_path, pack_folder(tmp_path, compiled))
    content = archive.read_bytes()
    archive.write_bytes(content[:-22] + b"PK\6\7" + bytes(16) + content[-22:-2] + b"\xff\xff" + bytes(0xFFFF))
    for limit in (archives.MAX_HEADER_BYTES, 400):
        monkeypatch.setattr(archives, "MAX_HEADER_BYTES", limit)
        with pytest.raises(Refusal, match="its central directory is missing or too long"):
            unpack(tmp_path, archive)
        archive.write_bytes(content)


def test_an_archive_reaches_nothing_outside_its_folder(tmp_path, compiled):
    """Links that lead out, names that climb and devices are left out; a program that is a link is refused."""
    links = [
        link("libescape.so", tarfile.SYMTYPE, "/etc/passwd"),
        link("libclimb.so", tarfile.SYMTYPE, "../../../outside.so"),
        link("libloose.so", tarfile.SYMTYPE, "libnothing.so"),
        link("libggml.so.0.9.4", tarfile.SYMTYPE, "llama-server"),
        link("libpipe.so", tarfile.FIFOTYPE, ""),
        tarfile.TarInfo("llama-b11434/../../libup.so"),
    ]
    made = unpack(tmp_path, pack_links(tmp_path, compiled, links, ["libggml.so"]))
    assert set(made.files) == FILES - {"bin/libggml.so"}
    assert not list(tmp_path.rglob("libup.so"))
    for kind, reason in ((tarfile.SYMTYPE, "links instead of programs"), (tarfile.LNKTYPE, "cannot be read")):
        archive = pack_links(tmp_path, compiled, [link("llama-server", kind, "/bin/sh")], ["llama-server"])
        with pytest.raises(Refusal, match=reason):
            unpack(tmp_path, archive)


def test_hard_links_inside_an_archive_are_files(tmp_path, programs):
    """Programs and a library of which the content lies under another name of the archive, as tar writes files with several names."""
    (programs / "a-server").hardlink_to(programs / "llama-server")
    (programs / "a-library").hardlink_to(programs / "libggml.so.0.9.4")
    archive = pack_folder(tmp_path, programs)
    with tarfile.open(archive) as packed:
        links = {member.name for member in packed if member.islnk()}
    assert links == {"llama-b11434/llama-server", "llama-b11434/libggml.so.0.9.4"}
    assert set(unpack(tmp_path, archive).files) == FILES
    assert {path.stat().st_nlink for path in (release_of(tmp_path) / "bin").iterdir()} == {1}


@pytest.fixture
def built(tmp_path):
    return builds.place(tmp_path / "prefix", builds.BUILD, "echo usage: --fit", {"commit": "abc"}, 12)


def pack(tmp_path):
    return installer.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), builds.BUILD)


def receive(tmp_path, archive):
    """What another host installs."""
    return installer.Installer(str(tmp_path / "other"), builds.BUILD, None).receive(builds.packed_of(archive))


def test_a_release_goes_to_another_host(tmp_path, built):
    expected = built[1]._replace(received_from="head")
    assert receive(tmp_path, pack(tmp_path)) == expected
    assert manifest.installed_manifest(release_of(tmp_path, "other")) == expected
    assert manifest.installed_manifest(release_of(tmp_path, "other"), builders=["head"])
    assert manifest.installed_manifest(release_of(tmp_path, "other"), builders=["worker1"]) is None, (
        "another host has to compile it"
    )
    assert manifest.installed_manifest(built[0], builders=["worker1"]), "what a host compiled itself counts"
    assert manifest.installed_manifest(built[0], targets=["llama-bench"]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": {"bin/llama-server": "0" * 64, "bin/ggml-rpc-server": "0" * 64}},
        {"cmake_options": {"GGML_X\x1b[2J": "ON"}},
    ],
)
def test_a_manifest_that_another_host_wrote_may_hold_anything(tmp_path, built, change):
    (built[0] / manifest.MANIFEST_FILE).write_text(json.dumps({**typed_json.dump(built[1]), **change}))
    with pytest.raises(Refusal, match=f"does not match {builds.BUILD.id} on its builder: remove"):
        receive(tmp_path, pack(tmp_path))
    assert not release_of(tmp_path, "other").exists()


def test_members_of_a_packed_release_that_do_not_belong_there_are_left_out(tmp_path, built):
    archive = tmp_path / "hostile.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(__file__, "../../outside")
        for name in (manifest.MANIFEST_FILE, *built[1].files):
            packed.add(built[0] / name, name)
    receive(tmp_path, archive)
    names = sorted(path.name for path in (tmp_path / "other").rglob("*") if path.is_file())
    assert names == ["ggml-rpc-server", "llama-server", "manifest.json"]


def test_programs_of_a_package_are_linked(tmp_path):
    program = tmp_path / "usr-bin-llama-server"
    build = builds.BUILD._replace(targets=("llama-server",), packaged={"llama-server": str(program)})
    target = installer.Installer(str(tmp_path / "prefix"), build, None)
    release = builds.RELEASE._replace(source="package", version="0.7.0")
    with pytest.raises(Refusal, match=f"{program} is missing"):
        target.link_programs(release)
    executable(program, "#!/bin/sh\necho usage:\necho '--fit [on|off]'\n")
    made = target.link_programs(release)
    assert (target.release_folder / "bin" / "llama-server").resolve() == program
    assert made == manifest.installed_manifest(target.release_folder)
    program.write_text("#!/bin/sh\necho usage: newer\n")
    assert manifest.installed_manifest(target.release_folder) is None


HELPS = {
    "printf 'usage:\\n\\377\\n--fit [on|off]\\n'": ({"--fit": True}, ""),
    "exec sleep 60": (None, r"llama-server did not print its help within 1 s"),
    "exit 1": (None, "llama-server does not run on this host: it printed nothing"),
    '[ "$PWD" = / ] && echo usage --rpc': ({}, ""),
    '[ "$LIBRARIES" = /opt ] && echo usage': ({}, ""),
}


@pytest.mark.parametrize("lines", HELPS)
def test_the_help_of_a_program(tmp_path, monkeypatch, lines):
    """It is asked in a folder that every account may enter, with what its libraries need."""
    known, error = HELPS[lines]
    monkeypatch.setattr(installer, "HELP_LIMIT_SECONDS", 1)
    monkeypatch.chdir(tmp_path)
    executable(tmp_path / "llama-server", f"#!/bin/sh\n{lines}\n")
    build = builds.BUILD._replace(targets=("llama-server",), environment={"LIBRARIES": "/opt"})
    target = installer.Installer(str(tmp_path), build, None)
    if error:
        with pytest.raises(Refusal, match=error):
            target.read_help(tmp_path)
    else:
        assert target.read_help(tmp_path)["llama-server"] == known
