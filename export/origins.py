"""Which part of the user's code a recorded node comes from: a module, and a line."""

from __future__ import annotations

import bisect
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from export.insides import get_proxy_mode

_OWN = str(Path(__file__).parent)
_NOT_OF_THE_USER = (str(Path(torch.__file__).parent), _OWN)
# What is there to be used like a user's own model.
_LIKE_THE_USERS = (str(Path(_OWN, "models")),)
# Code that is made while a program runs.
_MADE = ("<string>", "<frozen", "<eval_with_key>")
NO_MODULE = "none (the loss or predict= itself)"


@dataclass(frozen=True)
class Origin:
    """``module``: its path and class; ``file`` and ``number``: of the line that called torch."""

    module: str = ""
    file: str = ""
    number: int = 0

    @property
    def line(self) -> str:
        """The file's name, the line's number and what stands there; "" where it is not known."""
        if not self.file:
            return ""
        text = linecache.getline(self.file, self.number).strip()
        return f"{Path(self.file).name}:{self.number}" + (f": {text:.90}" if text else "")


class Origins:
    """Notes the origin of each node that is recorded, as ``node.meta["origin"]``.

    A gradient's is the origin of what it is the gradient of.
    """

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._users: dict[CodeType, bool] = {}
        # By autograd's sequence numbers, in their order, which a gradient's node has as well.
        self._numbers: list[int] = []
        self._recorded: list[Origin] = []
        self._end: CodeType | None = None
        self._again: Origin | None = None

    @property
    def module(self) -> str:
        """The module that runs, "" outside any."""
        return self._modules[-1] if self._modules else ""

    def watch(self, end: CodeType | None = None) -> None:
        """Note what the present recording adds to its graph; ``end``: outside is no user's code."""
        mode = get_proxy_mode()
        if mode is None:
            return
        self._end = end
        tracer: Any = mode.tracer
        create = tracer.create_node

        def noted(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            node.meta["origin"] = self._present()
            return node

        tracer.create_node = noted

    def again(self, node: fx.Node) -> None:
        """What is recorded next stands for this node of an earlier recording."""
        if self._again is None:
            self.watch()
        self._again = of(node)

    def _present(self) -> Origin:
        if self._again is not None:
            return self._again
        gradient: Any = torch._C._current_autograd_node()
        if gradient is not None:
            place = bisect.bisect_right(self._numbers, gradient._sequence_nr()) - 1
            return self._recorded[place] if place >= 0 else Origin()
        origin = self._of_frames(sys._getframe(2))
        number = torch._C._autograd._get_sequence_nr() - 1
        if self._numbers and self._numbers[-1] >= number:
            self._recorded[-1] = origin
        else:
            self._numbers.append(number)
            self._recorded.append(origin)
        return origin

    def here(self) -> Origin:
        """The origin of what runs now."""
        return self._of_frames(sys._getframe(1))

    def _of_frames(self, frame: FrameType | None) -> Origin:
        for each in self.users(frame):
            return Origin(self.module or NO_MODULE, each.f_code.co_filename, each.f_lineno)
        return Origin()

    def users(self, frame: FrameType | None) -> Iterator[FrameType]:
        """This frame and its callers, up to the recording's, of which are the user's code."""
        while frame is not None and frame.f_code is not self._end:
            if self.is_users(frame.f_code):
                yield frame
            frame = frame.f_back

    def of_error(self, error: BaseException) -> Origin:
        """Where in the user's code an error was raised, or in what that called."""
        found = Origin(self.module)
        step: TracebackType | None = error.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            if self.is_users(code):
                found = Origin(self.module or NO_MODULE, code.co_filename, step.tb_lineno)
            step = step.tb_next
        return found

    def is_users(self, code: CodeType) -> bool:
        if code not in self._users:
            name = code.co_filename
            own = name.startswith(_NOT_OF_THE_USER) and not name.startswith(_LIKE_THE_USERS)
            self._users[code] = not own and not name.startswith(_MADE)
        return self._users[code]

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Follows which of the model's modules runs."""

        def enter(name: str) -> Any:
            return lambda module, args: self._modules.append(f"{name} ({type(module).__name__})")

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._modules.pop()

        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name or "the model itself")))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def of(node: fx.Node) -> Origin:
    """The origin that was noted; an empty one for what the exporter adds by itself."""
    found: Origin = node.meta.get("origin", Origin())
    return found
