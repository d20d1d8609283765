"""Tiny tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.data.sources.made import CLASSES, JPEGS, NUM_ROWS, WORDS, Made, X, Y


def csv(where: Path) -> Made:
    lines = [f'{Y[row]},"{WORDS[row]}\nand, more",{row / 4}' for row in range(NUM_ROWS)]
    (where / "0.csv").write_text("\n".join(["y,words,score", *lines[:9]]) + "\n")
    (where / "1.csv").write_text("\n".join(["y,words,score", *lines[9:]]) + "\n")
    samples = [{"y": Y[r], "words": f"{WORDS[r]}\nand, more", "score": np.float64(r / 4)} for r in range(NUM_ROWS)]
    return Made(where, samples, files=(where / "0.csv",))


def parquet(where: Path) -> Made:
    import pyarrow.parquet

    table = _table()
    for year, rows in ((2023, table[:9]), (2024, table[9:])):
        (where / f"year={year}").mkdir()
        pyarrow.parquet.write_table(rows, where / f"year={year}" / "part.parquet", row_group_size=4)
    samples = [{**sample, "year": np.int64(2023 + (row >= 9))} for row, sample in enumerate(_table_samples())]
    options = {"shapes": {"listed": (2, 3)}}
    return Made(where, samples, options, files=(where / "year=2023" / "part.parquet",))


def arrow(where: Path) -> Made:
    import pyarrow as pa

    table = _table()
    with pa.ipc.new_file(where / "all.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=4)
    return Made(where / "all.arrow", _table_samples(), {"shapes": {"listed": (2, 3)}}, files=(where / "all.arrow",))


def arrow_stream(where: Path) -> Made:
    import pyarrow as pa

    table = _table()
    with pa.ipc.new_stream(where / "all.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=4)
    return Made(where / "all.arrow", _table_samples(), {"shapes": {"listed": (2, 3)}}, files=(where / "all.arrow",))


def _table() -> Any:
    import pyarrow as pa

    return pa.table(
        {
            "flag": [row % 3 == 0 for row in range(NUM_ROWS)],
            "fixed": pa.FixedSizeListArray.from_arrays(X.reshape(-1), 6),
            "listed": [x.tolist() for x in X.astype(np.float64)],
            "ragged": pa.array(
                [[float(at) for at in range(row % 4)] for row in range(NUM_ROWS)], pa.list_(pa.float16())
            ),
            "words": pa.array(WORDS).dictionary_encode(),
            "data": [word.encode() for word in WORDS],
            "inside": [{"y": int(y)} for y in Y],
            "day": pa.array(range(NUM_ROWS), pa.date32()),
        }
    )


def _table_samples() -> list[Mapping[str, Any]]:
    return [
        {
            "flag": np.bool_(row % 3 == 0),
            "fixed": X[row].reshape(-1),
            "listed": X[row].astype(np.float64),
            "ragged": np.arange(row % 4, dtype=np.float16),
            "words": WORDS[row],
            "data": WORDS[row].encode(),
            "inside.y": Y[row],
            "day": np.int64(row),
        }
        for row in range(NUM_ROWS)
    ]


def huggingface(where: Path) -> Made:
    made = _dataset(where)
    made.save_to_disk(where / "saved")
    files = (where / "saved" / "data-00000-of-00001.arrow",)
    return Made(where / "saved", _dataset_samples(), files=files)


def huggingface_object(where: Path) -> Made:
    return Made(_dataset(where), _dataset_samples())


def _dataset(where: Path) -> Any:
    import datasets

    (where / "21.jpg").write_bytes(JPEGS[21])
    images = [{"bytes": data, "path": None} for data in JPEGS]
    images[21] = {"bytes": None, "path": str(where / "21.jpg")}  # type: ignore[dict-item]
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=list(CLASSES)),
        x=datasets.Array2D((2, 3), "float32"),
        text=datasets.Value("string"),
    )
    labels = [row % 2 for row in range(NUM_ROWS)]
    columns = {"image": images, "label": labels, "x": list(X), "text": WORDS}
    return datasets.Dataset.from_dict(columns, features=features)


def _dataset_samples() -> list[Mapping[str, Any]]:
    rows = range(NUM_ROWS)
    return [{"image": JPEGS[r], "label": np.int64(r % 2), "x": X[r], "text": WORDS[r]} for r in rows]
