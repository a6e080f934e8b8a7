"""`./eb vllm serve MODEL --policy NAME [vLLM's flags]`: start vLLM with a policy as its scheduler, in vLLM's own environment."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from integrations.vllm.failsafe import make_policy
from policies import absolute, complete

TESTED = "0.32."


def vllm_version() -> str:
    """Return the version of vLLM in this environment; ValueError if there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        text = f"{sys.executable} has no vLLM. Activate its environment, or set EB_VLLM_PYTHON to its Python"
        raise ValueError(text) from None


def main(argv: list[str]) -> None:
    """Replace this process by vLLM; exit with 2 if the policy, an option or the version is wrong."""
    parser = argparse.ArgumentParser("./eb vllm serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("--policy", default="dynamic", help="a policy, as in dynamic+vtc, or a file with one")
    parser.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=VALUE", help="an option of it; may be repeated"
    )
    parser.add_argument("--record", default="", help="write a line for each arrival and step to this file")
    parser.add_argument("--untested", action="store_true", help=f"allow a version of vLLM other than {TESTED}x")
    own, theirs = parser.parse_known_args(argv)
    try:
        if wrong := next((text for text in own.policy_option if "=" not in text), None):
            raise ValueError(f"--policy-option is {wrong!r}, but must be NAME=VALUE, as in quantum=64")
        name, options = absolute(complete(own.policy)), dict(text.split("=", 1) for text in own.policy_option)
        make_policy(name, 1 << 10, options)
        if not (found := vllm_version()).startswith(TESTED) and not own.untested:
            raise ValueError(f"vLLM is {found}, but only {TESTED}x was tested. Use that, or add --untested to try it")
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    settings = {"policy": name, "options": options, "record": os.path.abspath(own.record) if own.record else ""}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "entry"), os.environ.get("PYTHONPATH"))))
    ours = ["--scheduler-cls", "eb_vllm.PolicyScheduler", "--middleware", "eb_vllm.Middleware"]
    command = [sys.executable, str(Path(sys.executable).parent / "vllm"), "serve", *theirs, *ours]
    os.execve(sys.executable, command, os.environ | {"EB_VLLM": json.dumps(settings), "PYTHONPATH": path})
