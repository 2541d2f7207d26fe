"""The set-up script: when it works, what it asks of pip, and what an interruption leaves."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipcall
import pytest
from lockfile import TORCH_CPU_INDEX, SetupError, digest, may_ask_second_index, parse_lock
from pipcall import PipResult, install_local_build

ROOT = Path(__file__).parents[3]
script: Any = importlib.import_module("setup")

# What pip 23.2 and 26.3 print, shortened.
RETRY = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
MISSING = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu "
    "(from versions: {})\nERROR: No matching distribution found for torch==2.13.0+cpu\n"
)
ELSEWHERE = MISSING.format("1.13.0, 2.13.0, 2.15.0")
NOWHERE = MISSING.format("none")
BAD_HASH = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
TORCH = parse_lock("torch==2.13.0+cpu --hash=sha256:aa\n")["torch"]


class FakePip:
    """Answers the calls in turn and keeps their arguments."""

    def __init__(self, *answers: PipResult | BaseException) -> None:
        self.answers = list(answers)
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> PipResult:
        self.calls.append(list(arguments))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ELSEWHERE, True),
        (NOWHERE, True),
        (RETRY + NOWHERE, False),
        # One index is down, another one answered: the version is not there.
        (RETRY + ELSEWHERE, True),
        (RETRY, False),
        (BAD_HASH, False),
        (ELSEWHERE.replace("torch==", "numpy=="), False),
        ("ERROR: Could not install packages due to an OSError: No space left on device\n", False),
        ("", False),
    ],
)
def test_second_index_only_for_a_version_that_is_nowhere(output: str, expected: bool) -> None:
    assert may_ask_second_index(output, "torch") is expected


def test_found_as_configured_asks_no_second_index(tmp_path: Path) -> None:
    pip = FakePip(PipResult(0, ""))
    assert install_local_build(pip, TORCH, tmp_path / "r.txt") is False
    (call,) = pip.calls
    assert not any("index" in word for word in call)
    assert {"--no-deps", "--require-hashes"} <= set(call)


def test_not_found_asks_the_second_index(tmp_path: Path) -> None:
    pip = FakePip(PipResult(1, ELSEWHERE), PipResult(0, ""))
    assert install_local_build(pip, TORCH, tmp_path / "r.txt") is True
    first, second = pip.calls
    assert TORCH_CPU_INDEX not in first
    assert second[: len(first)] == first
    assert second[second.index("--extra-index-url") + 1] == TORCH_CPU_INDEX


def test_network_error_asks_no_second_index(tmp_path: Path) -> None:
    pip = FakePip(PipResult(1, RETRY + NOWHERE))
    with pytest.raises(SetupError, match=r"could not install torch==2\.13\.0\+cpu$"):
        install_local_build(pip, TORCH, tmp_path / "r.txt")
    assert len(pip.calls) == 1


def test_second_index_may_fail_too(tmp_path: Path) -> None:
    pip = FakePip(PipResult(1, ELSEWHERE), PipResult(1, RETRY))
    with pytest.raises(SetupError, match="either"):
        install_local_build(pip, TORCH, tmp_path / "r.txt")


def test_digest_tells_names_contents_and_borders_apart() -> None:
    parts = [{"a": b"bc"}, {"ab": b"c"}, {"a": b"bd"}, {"b": b"bc"}, {"a": b"b", "c": b""}, {}]
    assert len({digest(part) for part in parts}) == len(parts)
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with small locks."""
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    for name, text in {
        "cpu.lock": "torch==2.13.0+cpu --hash=sha256:aa\nnumpy==2.3.5 --hash=sha256:bb\n",
        "gpu.lock": "torch==2.13.0 --hash=sha256:cc\n",
        "dev.lock": "pytest==9.2.0 --hash=sha256:dd\nnumpy==2.3.5 --hash=sha256:bb\n",
        "demo.lock": "recbole==1.2.1 --hash=sha256:ee\n",
        "base.in": "numpy\ntorch\n",
    }.items():
        (root / "requirements" / name).write_text(text)
    (root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return root


class Machine:
    """Stands in for the commands that set-up runs: makes a venv, answers pip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.requirements: list[str] = []
        self.fail_at = ""
        self.error: BaseException | None = None
        monkeypatch.setattr(script, "run_logged", self.run)
        monkeypatch.setattr(script, "check_machine", lambda variant: None)
        monkeypatch.setattr(script, "find_python", lambda venv: sys.executable)

    def run(self, command: Sequence[str], log: Path, lock_fd: int, packages: int) -> PipResult:
        line = " ".join(command)
        self.commands.append(list(command))
        log.write_text(f"$ {line}\nthe last line\n")
        if "-r" in command:
            self.requirements.append(Path(command[command.index("-r") + 1]).read_text())
        if self.fail_at and self.fail_at in line:
            if self.error is not None:
                raise self.error
            return PipResult(1, "ERROR: broken\n")
        if command[1:3] == ["-m", "venv"]:
            venv = Path(command[3])
            (venv / "bin").mkdir()
            (venv / "bin" / "python").symlink_to(sys.executable)
            (venv / "pyvenv.cfg").write_text("home = /x\nversion = 3.11.7\n")
        return PipResult(0, "")

    def count(self, text: str) -> int:
        return sum(text in " ".join(command) for command in self.commands)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def plan(root: Path, **changes: Any) -> Any:
    fields = {"variant": "cpu", "sets": ("dev", "demo"), "project": "editable"} | changes
    return script.Plan(venv=root / ".venv", root=root, **fields)


def test_fresh_then_nothing_to_do(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout))
    assert machine.count("-m venv") == 1
    # torch first and alone, then everything else, each package once.
    assert machine.requirements == [
        "torch==2.13.0+cpu --hash=sha256:aa\n",
        "numpy==2.3.5 --hash=sha256:bb\npytest==9.2.0 --hash=sha256:dd\n"
        "recbole==1.2.1 --hash=sha256:ee\n",
    ]
    assert machine.commands[-1][-2:] == ["-e", str(checkout)]
    assert script.missing_steps(plan(checkout)) == ()

    machine.commands.clear()
    script.set_up(plan(checkout))
    assert machine.commands == []


def test_gpu_needs_no_separate_torch(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout, variant="gpu", sets=()))
    assert machine.requirements == ["torch==2.13.0 --hash=sha256:cc\n"]


def test_what_makes_the_environment_anew(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout))
    both = ("locks", "project")
    assert script.missing_steps(plan(checkout, variant="gpu")) == both
    assert script.missing_steps(plan(checkout, sets=("dev",))) == both
    assert script.missing_steps(plan(checkout, project="none")) == ()

    moved = checkout / "moved"
    (checkout / ".venv").rename(moved)
    assert script.missing_steps(script.Plan(moved, "cpu", ("dev", "demo"), "none")) == both
    moved.rename(checkout / ".venv")

    config = checkout / ".venv" / "pyvenv.cfg"
    config.write_text(config.read_text().replace("3.11.7", "3.11.9"))
    assert script.missing_steps(plan(checkout)) == both
    config.write_text(config.read_text().replace("3.11.9", "3.11.7"))
    assert script.missing_steps(plan(checkout)) == ()

    lock = checkout / "requirements" / "dev.lock"
    lock.write_text(lock.read_text().replace("9.2.0", "9.2.1"))
    leftover = checkout / ".venv" / "leftover"
    leftover.mkdir()
    script.set_up(plan(checkout))
    assert machine.count("-m venv") == 2
    assert not leftover.exists()


def test_new_metadata_installs_the_project_only(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout))
    machine.commands.clear()
    (checkout / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    script.set_up(plan(checkout))
    (command,) = machine.commands
    assert command[-2:] == ["-e", str(checkout)]
    assert script.missing_steps(plan(checkout)) == ()


def test_packages_and_project_in_two_calls(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout, project="none"))
    assert machine.count("--no-build-isolation") == 0
    machine.commands.clear()
    script.set_up(plan(checkout, project="wheel"))
    (command,) = machine.commands
    assert command[-1] == str(checkout)
    assert "-e" not in command


@pytest.mark.parametrize("where", ["-m venv", "--require-hashes"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_interrupted_starts_over(
    checkout: Path, machine: Machine, where: str, error: BaseException
) -> None:
    machine.fail_at, machine.error = where, error
    with pytest.raises(type(error)):
        script.set_up(plan(checkout))
    assert script.missing_steps(plan(checkout)) == ("locks", "project")

    machine.fail_at = ""
    script.set_up(plan(checkout))
    assert machine.count("-m venv") == 2
    assert script.missing_steps(plan(checkout)) == ()


def test_interrupted_project_step_keeps_the_packages(checkout: Path, machine: Machine) -> None:
    machine.fail_at, machine.error = "--no-build-isolation", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        script.set_up(plan(checkout))
    assert script.missing_steps(plan(checkout)) == ("project",)


@pytest.mark.parametrize("left", [[], ["gti-setup.json.part"]])
def test_killed_before_the_first_stamp(checkout: Path, machine: Machine, left: list[str]) -> None:
    (checkout / ".venv").mkdir()
    for name in left:
        (checkout / ".venv" / name).write_text("{")
    script.set_up(plan(checkout))
    assert script.missing_steps(plan(checkout)) == ()


@pytest.mark.parametrize("stamp", ["", "{", "[]", '{"format": 0}'])
def test_a_damaged_stamp_starts_over(checkout: Path, machine: Machine, stamp: str) -> None:
    script.set_up(plan(checkout))
    (checkout / ".venv" / script.STAMP).write_text(stamp)
    script.set_up(plan(checkout))
    assert machine.count("-m venv") == 2


def test_a_vanished_interpreter_starts_over(checkout: Path, machine: Machine) -> None:
    script.set_up(plan(checkout))
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(checkout / "gone")
    assert script.missing_steps(plan(checkout)) == ("locks", "project")


def test_a_foreign_environment_is_left_alone(checkout: Path, machine: Machine) -> None:
    mine = checkout / ".venv" / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(SetupError, match="not made by this script"):
        script.set_up(plan(checkout))
    assert mine.exists()
    assert machine.commands == []


def test_failure_shows_the_log(checkout: Path, machine: Machine) -> None:
    machine.fail_at = "--require-hashes"
    with pytest.raises(SetupError) as caught:
        script.set_up(plan(checkout))
    assert str(checkout / ".venv" / script.LOG) in str(caught.value)
    assert str(caught.value).endswith("the last line\n")
    stamp = json.loads((checkout / ".venv" / script.STAMP).read_text())
    assert stamp["complete"] is False


def test_two_at_once_wait_for_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import setup; from pathlib import Path\n"
        "with setup.locked(Path(sys.argv[2])): print('got it')"
    )
    command = [sys.executable, "-c", code, str(ROOT / "scripts"), str(tmp_path)]
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "waiting for it" in other.stdout.readline()
        os.close(holder)
        assert other.stdout.read() == "got it\n"


def test_run_logged_keeps_output_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    words = "print('Installing collected packages: a, b'); print('Gr\\u00fc\\u00dfe'); exit(3)"
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        result = pipcall.run_logged([sys.executable, "-c", words], log, descriptor, 2)
    finally:
        os.close(descriptor)
    assert result.returncode == 3
    assert result.output.splitlines()[0] == "Installing collected packages: a, b"
    assert log.read_text().endswith(result.output)
    assert "installing 2 packages" in capsys.readouterr().out


def test_run_logged_ends_grandchildren_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipcall, "say", interrupt)
    words = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "subprocess.Popen(sleep, close_fds=False)\n"
        "print('Installing collected packages: a', flush=True); time.sleep(60)"
    )
    # The pipe ends when the last process that holds its other side is gone.
    ends, other = os.pipe()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipcall.run_logged([sys.executable, "-c", words], tmp_path / "log", other, 2)
    finally:
        os.close(other)
    ended, _, _ = select.select([ends], [], [], 30)
    os.close(ends)
    assert ended


def test_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("VARIANT", raising=False)
    default = script.parse_arguments([])
    assert (default.variant, default.sets, default.project) == ("cpu", ("dev", "demo"), "editable")
    assert default.venv == ROOT / ".venv"
    assert script.parse_arguments(["--sets", ""]).sets == ()
    monkeypatch.setenv("VARIANT", "gpu")
    assert script.parse_arguments([]).variant == "gpu"
    monkeypatch.setenv("VARIANT", "tpu")
    for arguments in ([], ["--variant", "cpu", "--sets", "dev,test"], ["--project", "zip"]):
        with pytest.raises(SystemExit):
            script.parse_arguments(arguments)
    assert "VARIANT is 'tpu'" in capsys.readouterr().err


def test_no_python_3_11(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"CPython 3\.11 is needed"):
        script.find_python(tmp_path)


def test_a_shim_without_a_version_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, body in {
        "python3.11": "echo 'no such version' >&2; exit 127",
        "python3": "echo 3 11; echo /opt/python3.11",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.find_python(tmp_path / ".venv") == "/opt/python3.11"


def test_a_half_cleared_environment_does_not_make_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run by an environment that lost its pyvenv.cfg, as `make` does after an interruption."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(script.sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.find_python(tmp_path / ".venv") == str(Path(sys.executable).resolve())
