"""The processor's name and fingerprint."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from rlstable.device import machine

CORE = "vendor_id\t: X\nmodel name\t: Fast One: 3 GHz\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\n"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts words into Linux's mouth."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", file)
    return file.write_text


def test_processor_has_the_name_its_maker_gives(told) -> None:
    told(CORE.format(mhz=1, flags="fma"))
    assert machine.name() == "Fast One: 3 GHz"


def test_where_the_system_does_not_say_it_is_the_architecture(told) -> None:
    assert machine.name() == (platform.processor() or platform.machine())
    assert machine.fingerprint().startswith(f"{platform.machine()}-")
    told("processor\t: 0\n")
    assert machine.name() == (platform.processor() or platform.machine())


def test_the_fingerprint_is_of_the_kind_and_not_of_the_moment(told) -> None:
    told(CORE.format(mhz=1, flags="fma avx2"))
    slow = machine.fingerprint()
    told(CORE.format(mhz=3000, flags="fma avx2") * 2)
    assert machine.fingerprint() == slow
    told(CORE.format(mhz=1, flags="fma avx2 avx512f"))
    assert machine.fingerprint() != slow
