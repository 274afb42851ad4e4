"""Fingerprint of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.device import machine

CORE = "vendor_id\t: X\nmodel name\t: Fast One: 3 GHz\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\n"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces `/proc/cpuinfo`."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", file)
    return file.write_text


def test_processor_fingerprint_does_not_depend_on_the_clock_rate(told) -> None:
    told(CORE.format(mhz=1, flags="fma avx2"))
    slow = machine.fingerprint()
    told(CORE.format(mhz=3000, flags="fma avx2") * 2)
    assert machine.fingerprint() == slow
    told(CORE.format(mhz=1, flags="fma avx2 avx512f"))
    assert machine.fingerprint() != slow
