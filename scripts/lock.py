"""Recompile ``requirements/*.lock`` with uv, which is installed in a throwaway environment.

    python3.11 scripts/lock.py [--upgrade] [NAME ...]      (names: cpu gpu dev demo load)

Pins that still fit are kept unless ``--upgrade`` is given. The gpu lock prefers the versions of
the cpu lock, and the dev lock must agree with it, so all variants test the same code. torch's CPU
build is looked for where this machine's pip looks (``PIP_FIND_LINKS``, PyPI) and, where that
fails, on PyTorch's public CPU index. Locks hold names, versions and hashes only: no addresses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lockfile import TORCH_CPU_INDEX, parse_lock

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
UV = "uv==0.13.9"
PLATFORM = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
# vLLM asks for these, text-only serving needs none, and torchvision breaks the CPU build's import.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
HEADER = "# Made by `make lock`; do not edit. Sources: {sources}\n"
SOURCES = {
    "cpu": ["base.in", "cpu.in"],
    "gpu": ["base.in", "gpu.in"],
    "dev": ["dev.in"],
    "demo": ["demo.in"],
    "load": ["load.in"],
}


def preferences(name: str) -> str:
    """Pins to prefer when compiling ``name``: its own lock, and for gpu first of all cpu's."""
    own = REQUIREMENTS / f"{name}.lock"
    pins = parse_lock(own.read_text()) if own.exists() else {}
    if name == "gpu":
        cpu = parse_lock((REQUIREMENTS / "cpu.lock").read_text())
        pins |= {key: entry for key, entry in cpu.items() if "+" not in entry.version}
    return "".join(f"{entry.name}=={entry.version}\n" for entry in pins.values())


def command(uv: str, name: str, output: Path, *, public_index: bool) -> list[str]:
    """The uv call that compiles the lock ``name`` into ``output``."""
    call = [uv, "pip", "compile", *(str(REQUIREMENTS / file) for file in SOURCES[name]), *PLATFORM]
    call += ["--generate-hashes", "--no-annotate", "--no-header", "--quiet", "-o", str(output)]
    if name == "demo":
        call.append("--no-deps")
    if name == "dev":
        call += ["-c", str(REQUIREMENTS / "cpu.lock")]
    for package in LEFT_OUT:
        call += ["--no-emit-package", package]
    if name in ("cpu", "dev"):
        for place in os.environ.get("PIP_FIND_LINKS", "").split():
            call += ["--find-links", place]
    if public_index:
        call += ["--extra-index-url", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match"]
    return call


def compile_lock(uv: str, name: str, *, upgrade: bool) -> None:
    """Write ``requirements/NAME.lock``; the old one stays when uv finds no solution."""
    target = REQUIREMENTS / f"{name}.lock"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / target.name
        for public_index in (False, True):
            # uv reads the pins to prefer from the output file itself.
            output.write_text("" if upgrade else preferences(name))
            call = command(uv, name, output, public_index=public_index)
            if subprocess.run(call, check=False).returncode == 0:
                break
            if public_index or name != "cpu":
                raise SystemExit(f"uv could not compile {target.name}")
        text = HEADER.format(sources=", ".join(SOURCES[name])) + output.read_text()
    partial = target.with_suffix(".lock.part")
    partial.write_text(text)
    partial.replace(target)
    print(f"{target.relative_to(ROOT)}: {len(parse_lock(text))} packages")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Recompile requirements/*.lock.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(SOURCES)}")
    parser.add_argument("--upgrade", action="store_true", help="take the newest fitting versions")
    args = parser.parse_args()
    unknown = set(args.names) - set(SOURCES)
    if unknown:
        parser.error(f"unknown lock: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", UV], check=True)
        for name in SOURCES:
            if not args.names or name in args.names:
                compile_lock(f"{folder}/bin/uv", name, upgrade=args.upgrade)


if __name__ == "__main__":
    main()
