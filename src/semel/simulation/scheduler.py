"""Drivers are threads, and a baton goes from one to the next: exactly one runs, and the seed says which."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

SWITCH_CHANCE = 0.3
DRIVERS_MAX = 80
#: Threads are kept from seed to seed: to start some takes as long as some batches.
_THREADS = ThreadPoolExecutor(DRIVERS_MAX + 1, "simulated-driver")


class DriverDied(BaseException):
    """Ends a simulated driver where it stands. No `except Exception` of the code under test may stop it."""


class Driver:
    """One life of the pipeline's process. `zombie`: it was stopped once, and somebody else was started meanwhile."""

    def __init__(self, number: int, body: Callable[[Driver], None]) -> None:
        self.number = number
        self.body = body
        self.dead = False
        self.ended = False
        self.zombie = False
        #: What it ended with, if that was an error.
        self.error: Exception | None = None
        #: Nobody else was there since it was launched.
        self.alone = False
        self.wake_at_call = 0
        self.baton = threading.Lock()
        self.baton.acquire()

    def __str__(self) -> str:
        return f"driver {self.number}"


class Scheduler:
    """Runs in the thread of the simulation; a driver gives the baton back when it is told to, and when it ends."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.started = 0
        self.live: list[Driver] = []
        self.current: Driver | None = None
        self._baton = threading.Lock()
        self._baton.acquire()

    def launch(self, body: Callable[[Driver], None]) -> Driver:
        self.started += 1
        driver = Driver(self.started, body)
        driver.alone = not self.live
        for other in self.live:
            other.alone = False
        self.live.append(driver)
        _THREADS.submit(self._live, driver)
        return driver

    def _live(self, driver: Driver) -> None:
        driver.baton.acquire()
        try:
            driver.body(driver)
        finally:
            driver.ended = True
            self._baton.release()

    def resume(self, driver: Driver) -> None:
        """Let a driver run until it hands over or ends."""
        self.current = driver
        driver.baton.release()
        self._baton.acquire()
        self.current = None
        if driver.ended:
            self.live.remove(driver)

    def hand_over(self, driver: Driver) -> None:
        """Called by the driver that runs: it stops here until somebody resumes it."""
        self._baton.release()
        driver.baton.acquire()

    def choose(self, calls: int) -> Driver:
        """Whose turn it is. One that sleeps is woken before its time only when nobody else is there."""
        awake = [d for d in self.live if d.wake_at_call <= calls] or self.live
        return awake[0] if len(awake) == 1 else self.dice.choice(awake)

    def wants_switch(self, driver: Driver, calls: int) -> bool:
        """Whether another driver goes on instead of this one."""
        if len(self.live) == 1 or not any(d.wake_at_call <= calls for d in self.live if d is not driver):
            return False
        return self.dice.random() < SWITCH_CHANCE

    def end_all(self) -> None:
        """No thread is left behind, however the run went."""
        while self.live:
            driver = self.live[0]
            driver.dead = True
            self.resume(driver)
