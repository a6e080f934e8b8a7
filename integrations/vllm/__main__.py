"""`./eb vllm COMMAND`: run a policy inside vLLM, or hold vLLM's scheduler to laws; `eb` itself starts `watch`."""

from __future__ import annotations

import sys
from importlib import import_module

from terminal.removed import removed

COMMANDS = {
    "serve": "run vLLM with a policy: ./eb vllm serve MODEL --policy dynamic+vtc",
    "watch": "show a recorded vLLM on the live page: ./eb vllm watch RECORD",  # by integrations/queue/watch.py, where ./eb goes
    "check": "hold vLLM's scheduler to the laws that policies keep",
}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        lines = [f"  {command:8}{does}" for command, does in COMMANDS.items()]
        print("usage: ./eb vllm COMMAND [arguments]", "", *lines, sep="\n")  # noqa: T201
    elif name == "watch" or name not in COMMANDS:
        unknown = f"unknown command {name!r}. Use ./eb vllm with one of: {', '.join(COMMANDS)}"
        raise SystemExit(f"error: {removed(f'vllm {name}') or unknown}")
    else:
        import_module(f"integrations.vllm.{name}").main(sys.argv[2:])
