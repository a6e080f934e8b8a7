"""Start the processes of a server with front ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from typing import cast

from api.service import LoadedEngine
from launch.front_ends.channel import SharedPlaces
from launch.front_ends.engine import FrontEnds
from launch.front_ends.front import Link
from launch.load_model import tokenizer_of
from launch.worker.engine_process import EngineProcess
from serving.call import Call
from serving.text_watch import TextWatch
from serving.watchdog import Watched

RETRY_SECONDS = 0.2  # between two tries to reach an engine's process


class ComputingProcess(EngineProcess):
    """The one process that computes."""

    def _load(self) -> None:
        self._worker.front_ends = FrontEnds(self._service)
        super()._load()

    def _connect(self, engine: LoadedEngine) -> None:
        self._worker.front_ends.connect(engine, self._worker.channel)

    def _begin(self) -> None:
        self._worker.front_ends.ready.set()
        super()._begin()


class FrontProcess(EngineProcess):
    """A process without an engine, which asks that of `ComputingProcess`."""

    def _load(self) -> None:
        app = self._worker.app.callable
        app.extensions["load-model"] = thread = threading.Thread(target=self._run, name="link", daemon=True)
        # The engine's process finds the program that a request serves, as other front ends have calls of it, too.
        self._service.programs.begin = partial(Call, depth=0, after=())  # type: ignore[method-assign]
        thread.start()

    def _run(self) -> None:
        """Keep a link, to the next process when one ends."""
        worker, service = self._worker, self._service
        tokenizer = tokenizer_of(service.config)
        service.texts = TextWatch(lambda: tokenizer.oldest_call, cast(Watched, self))
        service.texts.start()
        places = SharedPlaces(worker.channel, worker.number)
        self._use_one_core()
        while not service.draining:
            ours, theirs = socket.socketpair()
            link = Link(service, places, tokenizer, ours)
            reached = worker.channel.handover.pass_on([(theirs, worker.number)])
            theirs.close()
            if reached:
                worker.link = link
                link.run()
            time.sleep(RETRY_SECONDS)

    is_alive = True  # for the watch of texts

    def give_up(self, reason: str) -> None:
        """End the process, because a text cannot be tokenized; gunicorn starts another one."""
        self._errors.write(f"error: a front end failed: {reason}")
        self._errors.flush()
        os._exit(70)
