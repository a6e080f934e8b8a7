"""How long a call of a policy's hook lasts, as looks at the stack of its thread show it. Pure."""

from __future__ import annotations

from pathlib import PurePath
from traceback import walk_stack
from types import FrameType

from scheduling.located import locate


class LastingCall:
    """The call of a hook that look after look finds; a call costs nothing more for it.

    `seconds` is how long it has lasted, and `place` the line that it has reached, as in `order() of loop.py, line 5`. A
    file of a policy that is being loaded counts as such a call.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.place = ""
        self._call: FrameType | None = None  # kept, so that no other call's frame can take its place in memory

    def look(self, frame: FrameType | None, passed: float) -> float:
        """Return the seconds for which this call lasts; `passed` is the time since the look before."""
        stack = list(walk_stack(frame)) if frame is not None else []
        call = _call_in(stack)
        self.seconds = self.seconds + passed if call is not None and call is self._call else 0.0
        self._call = call
        self.place = "" if call is None else _place(call, stack)
        return self.seconds


def _call_in(stack: list[tuple[FrameType, int]]) -> FrameType | None:
    """Return the call of a hook, or of a file that `policies` loads; `stack` begins with the innermost call."""
    is_loading = False
    for frame, line in reversed(stack):
        module = str(frame.f_globals.get("__name__"))
        is_loading |= module == "policies"
        if locate([(frame, line)]) or (is_loading and frame.f_code.co_name == "<module>"):
            return frame
        if module.startswith("policies."):  # such as a list or an error of its own that a hook returned or raised
            return frame
    return None


def _place(call: FrameType, stack: list[tuple[FrameType, int]]) -> str:
    file = call.f_code.co_filename
    line = next(line for frame, line in stack if frame.f_code.co_filename == file)
    return str(locate(stack) or f"{PurePath(file).name}, line {line}")
