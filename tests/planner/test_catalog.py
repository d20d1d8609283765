"""The catalog: complete, with sources, plausible; and found by the names that people and drivers use."""

import re
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes
from shoal.planner.catalog import catalog_folder, device_names, link_names, read_device, read_link

DOCS = Path(__file__).parents[2] / "docs" / "catalog.md"
DEVICES = ["v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx-4090", "mi300x", "cpu-host"]
NVLINKS = ["nvlink-2", "nvlink-3", "nvlink-4", "nvlink-5"]
ETHERNETS = ["ethernet-1", "ethernet-10", "ethernet-25", "ethernet-100", "roce-100", "roce-200"]
LINKS = [*NVLINKS, "infinity-fabric", "pcie-4", "pcie-5", "ib-hdr", "ib-ndr", *ETHERNETS, "loopback"]
GPUS = [name for name in DEVICES if name != "cpu-host"]


def test_the_catalog_has_what_it_should_have() -> None:
    assert sorted(DEVICES) == device_names()
    assert sorted(LINKS) == link_names()


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_names_its_source_and_a_link_that_there_is(name: str) -> None:
    device = read_device(name)
    assert re.search(r"\b20\d\d\b", device.source), "a source has a year"
    assert device.link == "" or device.link in LINKS
    assert 0 < device.operation_s < 1e-3


@pytest.mark.parametrize("name", LINKS)
def test_every_link_names_its_source(name: str) -> None:
    link = read_link(name)
    assert len(link.source) > 20
    assert link.overlaps is (name != "loopback")


def test_no_source_is_an_address() -> None:
    for path in catalog_folder().rglob("*.toml"):
        assert "://" not in path.read_text()


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_the_memory_that_its_name_promises_less_what_the_driver_keeps(name: str) -> None:
    promised = {"h100": 80, "h200": 141, "b200": 180, "l40s": 48, "rtx-4090": 24, "mi300x": 192}
    size = promised.get(name) or int(name.split("-")[1])
    device = read_device(name)
    # 1e9 and 2**30 are both sold as a GB.
    assert 0.92 * size * 1e9 < device.memory_bytes <= 1.07 * size * 2**30
    assert 0 < device.reserved_bytes < 0.05 * device.memory_bytes
    assert device.title


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_faster_in_bfloat16_and_reaches_a_part_of_what_its_datasheet_says(name: str) -> None:
    device = read_device(name)
    assert device.bf16_matmul_flops_per_s > device.matmul_flops_per_s
    assert 0.4 < device.matmul_fraction < 1
    intensity = device.bf16_matmul_flops_per_s / device.memory_bytes_per_s
    assert 100 < intensity < 500, "operations per byte"


@pytest.mark.parametrize(
    ("kind", "slower", "faster"),
    [
        ("memory_bytes", "v100-16", "v100-32"),
        ("memory_bytes", "a100-40", "a100-80"),
        ("memory_bytes", "h100", "h200"),
        ("memory_bytes", "h200", "b200"),
        ("memory_bytes_per_s", "a100-40", "a100-80"),
        ("memory_bytes_per_s", "a100-80", "h100"),
        ("memory_bytes_per_s", "h100", "h200"),
        ("memory_bytes_per_s", "h200", "b200"),
        ("bf16_matmul_flops_per_s", "v100-32", "a100-40"),
        ("bf16_matmul_flops_per_s", "a100-80", "h100"),
        ("bf16_matmul_flops_per_s", "h200", "b200"),
        ("matmul_flops_per_s", "cpu-host", "v100-16"),
    ],
)
def test_the_newer_device_has_more(kind: str, slower: str, faster: str) -> None:
    assert getattr(read_device(slower), kind) < getattr(read_device(faster), kind)


@pytest.mark.parametrize(
    ("slower", "faster", "times"),
    [
        ("nvlink-2", "nvlink-3", 2),
        ("nvlink-3", "nvlink-4", 1.5),
        ("nvlink-4", "nvlink-5", 2),
        ("pcie-4", "pcie-5", 2),
        ("pcie-5", "nvlink-2", 150 / 63),
        ("ib-hdr", "ib-ndr", 2),
        ("ethernet-1", "ethernet-10", 10),
        ("ethernet-10", "ethernet-25", 2.5),
        ("ethernet-25", "ethernet-100", 4),
        ("roce-100", "roce-200", 2),
        ("ethernet-100", "roce-100", 1),
    ],
)
def test_the_faster_link_is_so_many_times_as_fast(slower: str, faster: str, times: float) -> None:
    assert read_link(faster).bytes_per_s == pytest.approx(times * read_link(slower).bytes_per_s)
    assert read_link(faster).latency_s <= read_link(slower).latency_s


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100 SXM", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("a100 40gb", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", "cpu-host"),
    ],
)
def test_a_device_is_found_however_it_is_written(asked: str, name: str) -> None:
    assert read_device(asked) == read_device(name)


@pytest.mark.parametrize(
    ("asked", "name"),
    [("NVLink4", "nvlink-4"), ("InfiniBand NDR", "ib-ndr"), ("hdr", "ib-hdr"), ("PCIe 5", "pcie-5")],
)
def test_a_link_is_found_however_it_is_written(asked: str, name: str) -> None:
    assert read_link(asked) == read_link(name)


@pytest.mark.parametrize("name", [*DEVICES])
def test_a_device_is_found_by_its_title(name: str) -> None:
    device = read_device(name)
    assert read_device(device.title or name) == device


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("H300", "Did you mean 'h200'?"),
        ("NVIDIA H300", "Did you mean 'h200'?"),
        ("cpu-hots", "Did you mean 'cpu-host'?"),
        ("A100", "Write 'a100-40' or 'a100-80'."),
        ("Tesla V100", "Write 'v100-16' or 'v100-32'."),
        ("NVIDIA A100 80GB PCIe", "Did you mean 'a100-80'?"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "Did you mean 'rtx-4090'?"),
        ("zzz", "Known: a100-40, "),
        ("nvidia", "Known: "),
        ("", "Known: "),
        ("../links/loopback", "the catalog has no '../links/loopback' in devices."),
    ],
)
def test_a_device_that_is_not_there_or_not_one_is_answered_with_what_to_write(asked: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_device(asked)
    assert words in str(error.value)


def test_a_link_that_is_not_there_or_not_one_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"'ib' is several of the catalog's links\. Write 'ib-hdr' or 'ib-ndr'\."):
        read_link("ib")
    with pytest.raises(ConfigError, match="Did you mean 'nvlink-5'"):
        read_link("nvlink-6")


def table_rows() -> dict[str, str]:
    """Return the rows of the tables in docs/catalog.md by the name in their first cell."""
    return {m[1]: m[0] for m in re.finditer(r"^\| `([a-z0-9-]+)` \|.*$", DOCS.read_text(), re.MULTILINE)}


def test_the_documentation_has_every_device_and_link_with_its_figures() -> None:
    rows = table_rows()
    assert sorted(rows) == sorted([*DEVICES, *LINKS])
    for name in GPUS:
        device = read_device(name)
        assert f"| {device.memory_bytes / 1e9:.1f} |" in rows[name]
        assert f"| {device.matmul_flops_per_s / 1e12:g} |" in rows[name]
        assert f"| {device.bf16_matmul_flops_per_s / 1e12:g} |" in rows[name]
        assert f"| {device.memory_bytes_per_s / 1e12:.2f} |" in rows[name]
        assert f"| {device.matmul_fraction:g} |" in rows[name]
        assert f"| {device.link} |" in rows[name]
    for name in LINKS:
        link = read_link(name)
        assert f"| {format_bytes(link.bytes_per_s)}/s | {link.latency_s * 1e6:g} us |" in rows[name]
