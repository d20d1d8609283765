"""Tiny datasets of files, archives and databases."""

import base64
import json
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.sources.beton_file import write_beton
from tests.data.sources.made import CLASSES, JPEGS, NUM_ROWS, WORDS, Made, X, Y

_SQUASHFS = """
aHNxcxoAAAAAAAAAAAACAAEAAAABABEAQAIBAAQAAAAgAwAAAAAAAI0CAAAAAAAAhQIAAAAAAAD//////////9sAAAAAAAAAwQEAAAAAAAB3AgAAAAAA
AP//////////eNq10TEOgCAMheGreIQiinAco4mji4f1Nmjiz4amSFi+pe+1Q+MZl/noJEd8ZuYVAv03pKwCooMW8mMRlFw5NKefUPc1sCNUk54rLUzL
TTvvE+u+dZKDmXmFQP8NKauA6KCF/FgEJVcOzekn1H0N7AjVpOdKCy81Vbhg5AB42mXSvQpBcRjH8f/L8f7+zmExsEhZLEoWJTdgUCaTsrsLV2FRBknJ
4i7cgs2klM3TOeLnef71dOr59F/+32PURqvPMer/1Lzdzy2zOnMHvE/TZB4An9O0mAfB1zQd5iHwC02XeRj8QdNjHgFv03bAPAq+pO2QeQx8T9sx8zj4
i7Yz5gnwifHfQKv71zV0ONG47H4K7p+N7JMGvxrZJwP+NLJPFvta2ScHPrKyTx58ZWWfAvjOyj5F8JuVfUrgDUf2KYMvHNmnAn5w/D74/kl4/606eu+P
7sJ/3lBTXaXvG0kvJxKkAHjaTdDNDcIwDIbhzy6/rRArdALU8s+towSBVIkLHBigo2SUjNJRiO0KOVIUPye/SgU7/H/naJrd69PXIFMr6vKs2osCCtNB
NGBmOopinlQnUcLCdBaNWJouItDKdNV9tDbddB+VqlZbAlUmbSmn1m2+kXxzIt88km8G++aafXPHvjmwbx7YN0f2zYl988i+maZKeQeC/ubj/kWx0fH5
7n++kjhaDgB42ktggIBqKA0ACegA3GcCAAAAAAAABIAAAAAAfwIAAAAAAAA=
"""
"""Made by mksquashfs 4.5.1 of cat/00.jpg to cat/11.jpg and dog/00.jpg to dog/10.jpg; see `in_squashfs`."""


def folder(where: Path) -> Made:
    for number, data in enumerate(JPEGS):
        place = where / CLASSES[number % 2]
        place.mkdir(exist_ok=True, parents=True)
        (place / f"{number:02d}.jpg").write_bytes(data)
    (where / "cat" / ".hidden.jpg").write_bytes(b"not a sample")
    rows = [*range(0, NUM_ROWS, 2), *range(1, NUM_ROWS, 2)]
    samples = [{"image": JPEGS[row], "label": np.int64(row % 2)} for row in rows]
    return Made(where, samples, files=tuple(where / CLASSES[row % 2] / f"{row:02d}.jpg" for row in rows))


def plain_files(where: Path) -> Made:
    for number, word in enumerate(WORDS):
        (where / f"{number:02d}.dat").write_bytes(word.encode())
    samples = [{"data": word.encode(), "name": f"{number:02d}.dat"} for number, word in enumerate(WORDS)]
    return Made(where, samples, {"names": True}, files=(where / "00.dat",))


def webdataset(where: Path) -> Made:
    for shard, rows in enumerate((range(9), range(9, NUM_ROWS))):
        with tarfile.open(where / f"shard-{shard}.tar", "w") as tar:
            for row in rows:
                _add(tar, f"train/{row:04d}.jpg", JPEGS[row])
                _add(tar, f"train/{row:04d}.cls", str(Y[row]).encode())
                _add(tar, f"train/{row:04d}.x.npy", _npy(X[row]))
                _add(tar, f"train/{row:04d}.txt", WORDS[row].encode())
    samples = [{"image": JPEGS[r], "label": Y[r], "x": X[r], "txt": WORDS[r]} for r in range(NUM_ROWS)]
    return Made(str(where / "shard-{0..1}.tar"), samples, files=(where / "shard-0.tar",))


def webdataset_gz(where: Path) -> Made:
    with tarfile.open(where / "all.tar.gz", "w:gz") as tar:
        for row in range(NUM_ROWS):
            _add(tar, f"{row}.cls", str(Y[row]).encode())
    return Made(where / "all.tar.gz", [{"label": y} for y in Y], files=(where / "all.tar.gz",))


def lmdb(where: Path) -> Made:
    import lmdb

    with lmdb.open(str(where / "db"), map_size=1 << 22) as database, database.begin(write=True) as transaction:
        for row, data in enumerate(JPEGS):
            transaction.put(f"{row:04d}".encode(), data)
        transaction.put(b"__len__", b"23")
    samples = [{"image": data, "key": f"{row:04d}"} for row, data in enumerate(JPEGS)]
    return Made(where / "db", samples, {"keys": True}, files=(where / "db" / "data.mdb",))


def squashfs(where: Path) -> Made:
    (where / "all.sqfs").write_bytes(base64.b64decode(_SQUASHFS))
    samples = [{"image": data, "label": np.int64(label)} for label, data in in_squashfs()]
    return Made(where / "all.sqfs", samples, files=(where / "all.sqfs",))


def in_squashfs() -> Iterator[tuple[int, bytes]]:
    for label, (name, count) in enumerate((("cat", 12), ("dog", 11))):
        yield from ((label, b"\xff\xd8\xff" + f"{name} {at}".encode() * (5 + at)) for at in range(count))


def beton(where: Path) -> Made:
    raws = [np.full((2, 3, 3), row, np.uint8) for row in range(NUM_ROWS)]
    rows = [
        {"image": JPEGS[r], "pixels": raws[r], "label": int(Y[r]), "score": r / 4, "x": X[r], "data": WORDS[r].encode()}
        for r in range(NUM_ROWS)
    ]
    notes = [{"note": {"at": row}} for row in range(NUM_ROWS)]
    write_beton(where / "all.beton", [row | note for row, note in zip(rows, notes, strict=True)])
    samples = [
        row | {"label": np.int64(Y[at]), "score": np.float64(at / 4), "note": json.dumps(notes[at]["note"])}
        for at, row in enumerate(rows)
    ]
    return Made(where / "all.beton", samples, files=(where / "all.beton",))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


def _npy(array: Any) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()
