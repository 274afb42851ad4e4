"""Signals, tested in child processes: received between iterations and while XLA compiles, and passed on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

# Native work during which no Python handler runs, like compilation by XLA.
DEAF = """
import hashlib, os, signal, sys, threading, time
from rlstable.supervise.signals import Signals

def work():
    hashlib.pbkdf2_hmac("sha512", b"x", b"y", 200_000_000)

def ready():
    os.write(1, b"ready\\n")  # a handler that prints would fail inside of a print
"""


class Child:
    """A Python program that is sent signals once it says that it is ready."""

    def __init__(self, body: str):
        self.process = subprocess.Popen([sys.executable, "-c", DEAF + body], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        assert self.stdout.readline() == "ready\n"

    def ends(self, *numbers: int, within: float = 120.0) -> tuple[int, str]:
        """Sends signals with a pause, since two at once count as one; returns exit code and output."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.3)
        output, _ = self.process.communicate(timeout=within)
        return self.process.returncode, output


LISTENING = """
with Signals(owns_process={hard}) as signals:
    ready()
    for _ in range(100):
        time.sleep(0.1)
        if signals.received is not None:
            print("received", signals.received, flush=True)
            sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("hard", [True, False])
def test_first_signal_is_received_and_interrupts_nothing(number: int, hard: bool) -> None:
    assert Child(LISTENING.format(hard=hard)).ends(number) == (7, f"received {int(number)}\n")


STUBBORN = """
with Signals(owns_process={hard}) as signals:
    ready()
    {work}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_process_at_once_during_native_work(number: int) -> None:
    process = Child(STUBBORN.format(hard=True, work="work()")).process
    while process.poll() is None:  # signals in quick succession count as one
        process.send_signal(number)
        time.sleep(0.1)
    assert process.returncode == 128 + number


@pytest.mark.parametrize("hard", [True, False])
def test_closed_terminal_that_sends_two_signals_stops_the_run_once(hard: bool) -> None:
    body = """
with Signals(owns_process={hard}) as signals:
    ready()
    time.sleep(2.0)
    print("saved", signals.received, flush=True)
"""
    sent = Child(body.format(hard=hard))
    assert sent.ends(signal.SIGHUP, signal.SIGHUP) == (0, f"saved {int(signal.SIGHUP)}\n")


def test_second_signal_in_a_process_of_the_user_raises_keyboard_interrupt() -> None:
    """In a notebook Ctrl-C must stay an exception."""
    body = """
try:
    with Signals() as signals:
        ready()
        while signals.received is None:
            time.sleep(0.05)
        print("heard", flush=True)
        for _ in range(1200):  # a signal just before a sleep is heard after it
            time.sleep(0.1)
except KeyboardInterrupt:
    print("theirs", signals.received, flush=True)
"""
    sent = Child(body)
    sent.process.send_signal(signal.SIGINT)
    assert sent.stdout.readline() == "heard\n"
    assert sent.ends(signal.SIGINT) == (0, "theirs 2\n")


def test_signal_during_native_work_is_handled_by_another_thread() -> None:
    body = """
def leave():
    print("saved", signals.received, flush=True)
    os._exit(9)

with Signals(owns_process=True) as signals:
    with signals.exit_handler(leave):
        ready()
        work()
"""
    assert Child(body).ends(signal.SIGTERM) == (9, "saved 15\n")


def test_signal_before_the_native_work_ends_the_process_when_the_work_starts() -> None:
    body = """
def leave():
    print("left", flush=True)
    os._exit(9)

with Signals(owns_process=True) as signals:
    with signals.exit_handler(leave):
        pass
    ready()
    while signals.received is None:
        time.sleep(0.05)
    print("heard", flush=True)
    with signals.exit_handler(leave):
        print("never", flush=True)
"""
    assert Child(body).ends(signal.SIGTERM) == (9, "heard\nleft\n")


def test_handler_of_a_scheduler_is_called_after_the_run_has_saved() -> None:
    """Like submitit: SIGUSR2 puts the job back into the queue and exits, SIGTERM is ignored."""
    body = """
def requeue(number, frame):
    print("requeued", number, flush=True)
    sys.exit(3)

signal.signal(signal.SIGUSR2, requeue)
signal.signal(signal.SIGTERM, lambda *_: print("ignored", flush=True))
with Signals(owns_process=True) as signals:
    ready()
    while signals.received is None:
        time.sleep(0.05)
    print("saving", flush=True)
"""
    sent = Child(body)
    sent.process.send_signal(signal.SIGTERM)
    assert sent.stdout.readline() == "ignored\n"
    assert sent.ends(signal.SIGUSR2) == (3, "saving\nrequeued 12\n")


@pytest.mark.parametrize("hard", [True, False])
def test_signal_that_the_process_was_started_to_ignore_stays_ignored(hard: bool) -> None:
    """A shell script starts background jobs with SIGINT ignored; SIGTERM still ends them."""
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)" + LISTENING.format(hard=hard)
    assert Child(ignoring).ends(signal.SIGINT, signal.SIGINT, signal.SIGTERM) == (7, "received 15\n")


def test_signals_are_not_handled_outside_the_main_thread() -> None:
    body = """
def other():
    with Signals(owns_process=True) as signals:
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signals.received)
thread = threading.Thread(target=other); thread.start(); thread.join()
"""
    process = subprocess.run([sys.executable, "-c", DEAF + body], capture_output=True, text=True, timeout=30)
    assert process.stdout == "True None\n"
