"""The contract against a service: ``python -m tests.contract --examples 5000 [--url URL]``.

Reads the service's own OpenAPI document and has schemathesis send what it allows and what it
forbids, single and in chains, with every check on. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from service.app import openapi_document  # noqa: E402


def operations() -> int:
    """How many operations the document has."""
    return sum(len(item) for item in openapi_document()["paths"].values())


def run(url: str, examples: int, options: Sequence[str] = ()) -> int:
    """Exit status of schemathesis against a service.

    Args:
        url: the service's address.
        examples: how many to generate, over all operations; chains and edge cases come on top.
        options: further options of ``schemathesis run``.
    """
    each = max(1, math.ceil(examples / operations()))
    command = [sys.executable, "-m", "schemathesis.cli"]
    command += [f"--config-file={FOLDER / 'schemathesis.toml'}"]
    command += [
        "run",
        f"{url}/openapi.json",
        f"--max-examples={each}",
        "--generation-database=none",
    ]
    # The configuration file would take the path from the working directory.
    surroundings = os.environ | {"SCHEMATHESIS_HOOKS": str(FOLDER / "hooks.py")}
    return subprocess.run([*command, *options], check=False, env=surroundings).returncode


def main() -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(description="Hold a service to its OpenAPI document.")
    parser.add_argument("--examples", type=int, default=5000, help="requests to generate")
    parser.add_argument("--url", help="a running service; without it, one with the fake engine")
    arguments, options = parser.parse_known_args()
    began = time.monotonic()
    if arguments.url:
        code = run(arguments.url.rstrip("/"), arguments.examples, options)
    else:
        from contract_service import serving

        with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (host, port):
            code = run(f"http://{host}:{port}", arguments.examples, options)
    sys.stderr.write(f"took {time.monotonic() - began:.0f} s\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
