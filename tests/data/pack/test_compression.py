"""A column is compressed where that makes it load faster, by what was measured, and the reason is said."""

import os
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.data.pack.compression import Trial, block_rows, choose
from shoal.data.pack.encode import Block
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column, Flat
from shoal.data.pack.writer import pack

ROWS = 4096
SLOW, FAST = 20e6, 1e12
COLUMNS = (
    Column("steady", "array", "float32", (64,)),
    Column("noise", "array", "uint8", (256,)),
    Column("label", "scalar", "int64"),
    Column("ids", "tokens", "uint16"),
)


def block() -> Block:
    ids = np.zeros(ROWS * 128, np.uint16)
    return Block(
        ROWS,
        {
            "steady": np.repeat(np.arange(ROWS, dtype=np.float32), 64).reshape(ROWS, 64),
            "noise": np.frombuffer(os.urandom(ROWS * 256), np.uint8).reshape(ROWS, 256),
            "label": np.zeros(ROWS, np.int64),
            "ids": Flat(ids, np.arange(ROWS + 1) * 128),
        },
    )


def test_on_slow_storage_what_shrinks_is_compressed() -> None:
    chosen = {choice.column.name: choice for choice in choose(COLUMNS, "auto", block(), SLOW)}
    assert chosen["steady"].column.compression in ("lz4", "zstd")
    assert "instead of 20 MB/s" in chosen["steady"].why
    assert chosen["noise"].column.compression == "none"
    assert chosen["label"].why.startswith("none: it is 1.0% of a row")
    assert "windows of tokens are gathered from the map" in chosen["ids"].why


def test_on_fast_storage_nothing_is_compressed() -> None:
    assert {choice.column.compression for choice in choose(COLUMNS, "auto", block(), FAST)} == {"none"}


def test_the_time_of_a_byte_is_reading_and_decompressing() -> None:
    trial = Trial("zstd", smaller=1 / 3, decode_bytes_per_s=1.2e9)
    assert trial.load_bytes_per_s(150e6) == pytest.approx(327e6, rel=0.01), "the example of the module"
    assert trial.load_bytes_per_s(2e9) == pytest.approx(1.0e9, rel=0.01)


def test_what_is_asked_for_is_done_and_what_is_not_is_said() -> None:
    chosen = {choice.column.name: choice for choice in choose(COLUMNS, "zstd", block(), None)}
    assert [chosen[name].column.compression for name in ("steady", "noise", "label", "ids")] == ["zstd"] * 3 + ["none"]
    assert "ask for it by name" in chosen["ids"].why
    by_name = choose(COLUMNS[3:], {"ids": "lz4"}, block(), None)
    assert by_name[0].column.compression == "lz4"
    with pytest.raises(ConfigError, match="'gzip' is none"):
        choose(COLUMNS, "gzip", block(), None)


def test_a_block_has_about_256_kilobytes_of_the_widest_column() -> None:
    columns = [choice.column for choice in choose(COLUMNS[:3], {"steady": "zstd", "label": "zstd"}, block(), FAST)]
    assert block_rows(columns, block()) == {"zstd": (256 << 10) // 256}


def test_the_speed_of_the_storage_decides_and_is_measured_where_it_is_not_given(tmp_path: Path) -> None:
    lines: list[str] = []

    class Told(Quiet):
        def say(self, line: str) -> None:
            lines.append(line)

    rows = [{"x": np.full(512, row, np.float32)} for row in range(2000)]
    pack(rows, tmp_path / "slow.pack", storage_bytes_per_s=SLOW, report=Told())
    assert Pack(tmp_path / "slow.pack").columns["x"].compression != "none"
    assert Pack(tmp_path / "slow.pack")[1234]["x"][7] == 1234
    assert not any(line.startswith("storage:") for line in lines)
    pack(rows, tmp_path / "here.pack", report=Told())
    assert any(line.startswith("storage:") and line.endswith("/s.") for line in lines)
    assert sum(line.startswith("x: array float32 [512]. Compression: ") for line in lines) == 2
