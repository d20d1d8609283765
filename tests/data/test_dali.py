"""What a DALI pipeline is fed, beside what shoal's loader gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import DataError
from shoal.data.dali import dali_source
from shoal.data.loader import Loader
from shoal.data.pack.reader import Pack
from tests.data.packs import images_pack


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images_pack(tmp_path_factory.mktemp("packs") / "images.pack", 30)


def test_dali_is_given_encoded_images_and_labels_in_the_order_of_the_loader(images: Path) -> None:
    loader = Loader(images, batch_size=8, seed=2)
    for epoch in (0, 1):
        source = dali_source(images, batch_size=8, seed=2)
        for number, batch in enumerate(loader):
            encoded, labels = source(Info(number, epoch))
            assert [int(label) for label in labels] == batch["label"].tolist()
            assert [image.tobytes() for image in encoded] == batch["image"]
        with pytest.raises(StopIteration):
            source(Info(len(source), epoch))


def test_workers_share_each_batch(images: Path) -> None:
    alone = dali_source(images, batch_size=9)
    parts = [dali_source(images, batch_size=9, shares=(0.5, 0.2, 0.3), index=index) for index in range(3)]
    for number in range(len(alone)):
        labels = [int(label) for part in parts for label in part(number)[1]]
        assert labels == [int(label) for label in alone(number)[1]]


def test_a_column_that_is_not_there_is_named(images: Path) -> None:
    with pytest.raises(DataError, match=r"has no column 'target'. It has: image, label"):
        dali_source(images, batch_size=4, columns=("image", "target"))


def test_a_dali_pipeline_decodes_what_it_is_given(images: Path) -> None:
    dali: Any = pytest.importorskip("nvidia.dali", reason="nvidia-dali-cuda130 is not installed")
    fn: Any = pytest.importorskip("nvidia.dali.fn")
    source = dali_source(images, batch_size=8, shuffle=False)

    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, labels = fn.external_source(source=source, num_outputs=2, batch=True, batch_info=True)
        return fn.decoders.image(encoded, device="cpu"), labels

    built = pipeline()
    built.build()
    pixels, labels = built.run()
    assert [int(labels.at(i)) for i in range(8)] == list(range(8))
    from PIL import Image

    for number in range(8):
        with Image.open(_file(images, number)) as image:
            wanted = np.asarray(image.convert("RGB")).astype(int)
        assert np.abs(np.asarray(pixels.at(number)).astype(int) - wanted).mean() < 2  # another chroma filter


def _file(images: Path, number: int) -> Any:
    import io

    return io.BytesIO(Pack(images)[number]["image"])


class Info:
    """What DALI says of a batch."""

    def __init__(self, iteration: int, epoch_idx: int) -> None:
        self.iteration, self.epoch_idx = iteration, epoch_idx
