"""`./eb vllm COMMAND`: run a policy inside vLLM, hold vLLM's scheduler to laws, or decide a recorded run again; `eb` itself starts `watch`."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = ("serve", "check", "replay")

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        raise SystemExit(f"error: unknown command {name!r}. Use ./eb vllm with one of: {', '.join(COMMANDS)}, watch")
    import_module(f"engines.{name}").main(sys.argv[2:])
