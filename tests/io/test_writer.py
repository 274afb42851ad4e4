"""The background writer makes its calls in order and bounds its queue."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlstable.io.writer import Writer


def test_writer_makes_its_calls_in_order_in_one_thread() -> None:
    writer, made = Writer(), []
    for number in range(100):
        give = writer.ahead if number % 3 else writer.soon
        give(lambda number: made.append((number, threading.get_ident())), number)
    writer.wait()
    assert [number for number, _ in made] == list(range(100))
    threads = {thread for _, thread in made}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    writer.close()
    writer.close()


def test_training_waits_for_a_stalled_disk_only_when_the_queue_is_full() -> None:
    writer, goes_on, made = Writer(most=3), threading.Event(), []
    writer.submit_bounded(goes_on.wait)
    writer.submit_bounded(made.append, 1)
    writer.submit_bounded(made.append, 2)
    fourth = threading.Thread(target=writer.ahead, args=(made.append, 3))
    fourth.start()
    fourth.join(0.2)
    assert fourth.is_alive()  # it waits for room
    assert made == []
    writer.submit(made.append, 4)  # which what is rare does not
    goes_on.set()
    fourth.join()
    writer.close()
    assert sorted(made) == [1, 2, 3, 4]
    assert made[:2] == [1, 2]


def test_failing_call_of_the_writer_stops_no_other_call() -> None:
    writer, made = Writer(most=1), []
    with pytest.warns(RuntimeWarning, match="rlstable: not written: ZeroDivisionError") as told:
        for number in (0, 1, 0, 2):
            writer.submit_bounded(lambda number: made.append(1 // number), number)
        writer.wait()
    assert len(told) == 2
    assert made == [1, 0]
    writer.close()


def test_ending_process_makes_the_remaining_calls_of_the_writer(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from rlstable.io.writer import Writer
writer = Writer()
writer.submit(time.sleep, 0.3)
writer.submit(Path({str(tmp_path / "late")!r}).touch)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3
    assert (tmp_path / "late").exists()
