"""Console output, word for word, also of one seed among several; and lines about long operations."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable

import pytest

from rlstable.io.console import Console, Reminder, SeedConsole


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_lines(total: int = 1_000_000) -> tuple[Console, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Console("lines", total, stream=stream, clock=clock), stream, clock


def test_console_of_lines_aligns_and_throttles_its_lines():
    console, stream, clock = make_lines()
    console.log(0, {})
    console.log(10, {"training/sps": 1.0})  # within five seconds of the last: no line
    clock.now += 5
    console.log(123_456, {"training/sps": 45_678.9, "episode/sum_reward": 3.25, "guards/env/trips": 2})
    clock.now += 1
    evaluation = {
        "eval/episode_reward": 812.345,
        "eval/avg_episode_length": 999.0,
        "eval/aborted_share": 0.125,
        "guards/finite_update/trips": 1,
        "guards/finite_update/gradient": 7,
    }
    console.log(500_000, evaluation)
    clock.now += 5
    console.log(1_000_000, {"training/sps": float("nan"), "episode/sum_reward": 1.0})
    assert stream.getvalue().splitlines() == [
        "step         0 / 1,000,000    0.0 %         -- steps/s  ETA       --  return         --  trips 0",
        "step   123,456 / 1,000,000   12.3 %     45,679 steps/s  ETA  0:00:36  return       3.25  trips 2  in training",
        "step   500,000 / 1,000,000   50.0 %     45,679 steps/s  ETA  0:00:06  return     812.35  trips 3"
        "  evaluated  length 999.0  aborted 12.5 %",
        "step 1,000,000 / 1,000,000  100.0 %         -- steps/s  ETA  0:00:00  return     812.35  trips 3"
        "  evaluated 500,000 steps ago",
    ]


def test_console_prints_each_event_in_one_line():
    console, stream, _ = make_lines()
    console.event(123_456, "guard_tripped", {"guard": "quarantine", "physics": 2, "reward": 1})
    console.event(5, "checkpoint_failed", {"checkpoint": 1200, "error": "OSError: No space\n  left on device"})
    console.event(0, "resumed", {"iteration": 3, "version": "0.1.0"})
    console.event(7, "error", {})
    console.event(8, "sign", {"sign": "critic_behind", "text": "the value network lags behind", "value": 0.5})
    assert stream.getvalue().splitlines() == [
        "! step 123,456  quarantine: 3 trips (physics 2, reward 1)",
        "! step 5  checkpoint_failed: checkpoint 1,200, error OSError: No space left on device",
        "- step 0  resumed: iteration 3, version 0.1.0",
        "! step 7  error",
        "! step 8  sign critic_behind: the value network lags behind",
    ]


def test_console_adds_up_trips_of_consecutive_iterations():
    console, stream, clock = make_lines()
    for step in range(1, 6):
        console.event(step, "guard_tripped", {"guard": "env", "physics": 1})
        clock.now += 1
    console.event(6, "guard_tripped", {"guard": "finite_update", "gradient": 1})
    console.event(6, "guard_tripped", {"guard": "env", "reward": 2})
    console.event(7, "guard_tripped", {"guard": "env", "reward": 1})
    clock.now += 5
    console.event(8, "guard_tripped", {"guard": "env", "physics": 1})
    console.event(9, "guard_tripped", {"guard": "env", "physics": 5})
    console.close()
    console.close()
    assert stream.getvalue().splitlines() == [
        "! step 1  env: 1 trip (physics 1)",
        "! step 6  env: 4 trips (physics 4)",
        "! step 6  finite_update: 1 trip (gradient 1)",
        "! step 8  env: 4 trips (reward 3, physics 1)",
        "! step 9  env: 5 trips (physics 5)",
    ]


def test_console_of_lines_prints_compiling_messages_and_the_summary():
    console, stream, clock = make_lines()
    with console.compiling("training"):
        clock.now += 12.34
    with pytest.raises(RuntimeError, match="boom"), console.compiling("evaluation"):
        clock.now += 1
        raise RuntimeError("boom")
    console.message("[not markup] done")
    console.summary([("stop reason", "completed"), ("run", "runs/ant/1")])
    assert stream.getvalue().splitlines() == [
        "compiling training ...",
        "compiled training in 12.3 s",
        "compiling evaluation ...",
        "failed to compile evaluation after 1.0 s",
        "[not markup] done",
        "  stop reason  completed",
        "  run          runs/ant/1",
    ]


def test_console_auto_is_of_lines_and_uncoloured_without_a_terminal(capsys):
    console = Console("auto", 100)
    console.event(1, "error", {"message": "x"})
    assert capsys.readouterr().out == "! step 1  error: message x\n"


class Terminal(io.StringIO):
    """A terminal that knows colours."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that are seen, without colours."""
        lines = [""]
        for letter in re.sub(r"\x1b\[\d+m", "", self.getvalue()):
            if letter == "\n":
                lines.append("")
            elif letter == "\r":
                self.column = 0
            else:
                lines[-1] = lines[-1][: self.column] + letter + lines[-1][self.column + 1 :]
            self.column = 0 if letter in "\r\n" else self.column + 1
        return [line.rstrip() for line in lines]

    column = 0


def test_terminal_has_a_bar_below_the_lines_until_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), Clock()
    console = Console("auto", 1000, stream=stream, clock=clock)
    console.message("compiling training ...")
    console.log(100, {"training/sps": 1234.5, "episode/sum_reward": 9.38})
    bar = "━╌╌╌╌╌╌╌╌╌  10.0 %  ETA 0:00:01  9.38 in training  trips 0  1,234 steps/s"
    assert stream.screen() == ["compiling training ...", bar]
    console.log(200, {"episode/sum_reward": 10.0})  # too soon for another drawing
    assert stream.screen()[-1] == bar
    clock.now += 1
    console.log(500, {"eval/episode_reward": 924.76, "episode/sum_reward": 30.5})
    console.event(500, "error", {"message": "x"})
    *_, evaluated, event, bar = stream.screen()
    assert evaluated.startswith("step   500 / 1,000   50.0 %")
    assert event == "! step 500  error: message x"
    assert bar == "━━━━━╌╌╌╌╌  50.0 %  ETA 0:00:01  924.76 evaluated  30.50 in training  trips 0  1,234 steps/s"
    monkeypatch.setenv("COLUMNS", "30")
    clock.now += 1
    console.log(600, {})
    assert len(stream.screen()[-1]) == 29
    console.summary([("stop reason", "completed")])
    assert stream.screen()[-3:] == ["! step 500  error: message x", "  stop reason  completed", ""]


def test_return_in_training_waits_until_long_episodes_could_end() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console("lines", 1000, whole_from=200, stream=stream, clock=clock)
    for step, value in ((100, 9.38), (200, 812.0)):
        clock.now += 10
        console.log(step, {"episode/sum_reward": value})
    first, second = stream.getvalue().splitlines()
    assert "in training" not in first and "return         --  " in first
    assert "return     812.00" in second and second.endswith("in training")


def test_console_of_lines_has_no_bar_on_a_terminal() -> None:
    stream = Terminal()
    Console("lines", 1000, stream=stream, clock=Clock()).log(100, {})
    assert stream.screen()[0].startswith("step   100 / 1,000")


def test_closed_pipe_of_the_console_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError("no reader")

    console = Console("lines", 100, stream=Closed())
    with console.compiling("training"):
        console.log(1, {"eval/episode_reward": 1.0})
    console.event(1, "error", {})
    console.summary([("a", "b")])
    console.close()


def test_console_replaces_characters_that_the_stream_cannot_write():
    raw = io.BytesIO()
    console = Console("lines", 100, stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.message("größer")
    assert raw.getvalue() == b"gr??er\n"


def test_events_that_repeat_the_table_at_the_start_are_not_shown() -> None:
    console, stream, _ = make_lines()
    console.event(0, "backend_chosen", {"backend": "native"})
    assert stream.getvalue() == ""


def test_console_of_one_seed_prints_neither_rows_nor_summaries() -> None:
    console, stream, _ = make_lines()
    own = SeedConsole(console, 0)
    own.log(64, {"eval/episode_reward": 1.0})
    own.summary([("stop reason", "completed")])
    own.close()
    assert stream.getvalue().splitlines() == []
    own.message("result.json could not be written")
    own.event(64, "stopped", {"stop_reason": "completed", "exit_code": 0, "step": 64})
    assert stream.getvalue().splitlines() == [
        "seed 0: result.json could not be written",
        "- step 64  stopped: of seed 0, stop_reason completed, exit_code 0",
    ]


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_reminder_names_the_innermost_operation() -> None:
    told: list[str] = []
    teller = Reminder(0.02, told.append)
    with teller.working("outside"):
        with teller.working("inside", expected=7.0):
            until(lambda: told)
            assert all(re.fullmatch(r"inside: \d+ s of about 7 s so far", line) for line in told)
        until(lambda: any(re.fullmatch(r"outside: \d+ s so far", line) for line in told))


def test_short_operations_print_nothing_and_share_one_thread() -> None:
    told: list[str] = []
    teller = Reminder(60.0, told.append)
    before = set(threading.enumerate())  # of which some may end meanwhile
    for _ in range(100):
        with teller.working("a moment"):
            pass
    assert told == []
    assert len(set(threading.enumerate()) - before) == 1
