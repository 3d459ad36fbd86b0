"""What GPUs have, one node of eight with its network each, and where every number is from.

    find_hardware("h100").memory_bandwidth, find_hardware("h100").sources["memory_bandwidth"]

Rates are dense peaks. Memory is in the 10^9 bytes of data sheets, a little less than a driver
shows: contexts and libraries, which no plan counts, want as much. What links have is of one
direction, half of what data sheets add up. What part of a peak is reached, latencies and the time
of a launch are assumptions, the same for all: `--calibrate` puts measured ones in their place.
"""

from __future__ import annotations

from dataclasses import replace

from hf_moe_ep.tools.hardware import ASSUMED, Hardware

_NOTES = "https://glennklockwood.com/garden/processors/"  # each page names NVIDIA's data sheet
_A100 = f"{_NOTES}A100, of NVIDIA's A100 data sheet 1758950-r4"
_H100 = f"{_NOTES}h100, of NVIDIA's H100 white paper"
_H200 = "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html, dense figures"
_B200 = f"{_NOTES}B200, the HGX variant at 1000 W"
_A100_NET = (
    "https://chippub.substack.com/p/disassembling-nvidias-16t-network: 200 Gbit/s to a GPU before "
    "the H100"
)
_H100_NET = (
    "https://magicalbits.net/?p=230748, of imbue's cluster: a ConnectX-7 of 400 Gbit/s to each GPU"
)
_H200_SYSTEM = (
    "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json, NVIDIA's own: 18 NVLinks of 900 GB/s, both directions, PCIe "
    "5.0 x16, ports of 400 Gbit/s"
)
_B200_BUS = (
    "https://github.com/pytorch/ao/pull/4002: 7680 bits at 3996 MHz, twice a cycle, as its driver "
    "says; data sheets round to 8 TB/s"
)
_B200_NET = (
    "https://www.fibermall.com/de/blog/nvidia-hgx-b300-overview.htm: 0.8 TB/s of eight GPUs, both "
    "directions"
)
_LINKS = (
    "https://petronellatech.com/hardware/h100-h200-nvlink-cluster-scaling/: 18 links of 25 GB/s a "
    "direction"
)

_PCIE = (
    "https://www.exxactcorp.com/blog/HPC/NVIDIA-H100: PCIe 5.0 of 128 GB/s, both directions, twice "
    "that of 4.0"
)

_ASSUMPTIONS = (
    "in_node_latency",
    "between_nodes_latency",
    "host_seconds",
    "host_memory_bandwidth",
    "overlap",
    "fractions",
)
_H100_SXM = Hardware(
    name="h100",
    matmul_flops={"float32": 66.9e12, "bfloat16": 989.4e12, "float8_e4m3fn": 1978.9e12},
    memory_bandwidth=3.35e12,
    memory_bytes=80e9,
    node_size=8,
    in_node_bandwidth=450e9,
    in_node_latency=10e-6,
    between_nodes_bandwidth=50e9,
    between_nodes_latency=20e-6,
    host_seconds=6e-6,
    host_link_bandwidth=64e9,
    # Sixteen channels of DDR5-4800 for eight GPUs are 77 GB/s each.
    host_memory_bandwidth=77e9,
    overlap=0.8,
    fractions={
        "matmul": 0.7,
        "grouped": 0.5,
        "attention": 0.5,
        "memory": 0.8,
        "in_node": 0.8,  # github.com/NVIDIA/nccl/issues/1264: 380 GB/s of 450 between two GPUs
        "between_nodes": 0.8,
        "on_host": 0.3,  # torchrun gives a process one thread, unless OMP_NUM_THREADS says more
        "host_copy": 0.8,
    },
    sources={
        "matmul_flops": _H100,
        "memory_bandwidth": _H100,
        "memory_bytes": _H100,
        "in_node_bandwidth": _LINKS,
        "between_nodes_bandwidth": _H100_NET,
        "host_link_bandwidth": _PCIE,
        **dict.fromkeys(_ASSUMPTIONS, ASSUMED),
    },
)
TABLE = {
    one.name: one
    for one in (
        replace(
            _H100_SXM,
            name="a100",
            matmul_flops={"float32": 19.5e12, "bfloat16": 312e12},
            memory_bandwidth=2.039e12,
            memory_bytes=80e9,
            in_node_bandwidth=300e9,
            between_nodes_bandwidth=25e9,
            host_link_bandwidth=32e9,
            # Sixteen channels of DDR4-3200.
            host_memory_bandwidth=51e9,
            sources={
                **_H100_SXM.sources,
                **dict.fromkeys(
                    ("matmul_flops", "memory_bandwidth", "memory_bytes", "in_node_bandwidth"), _A100
                ),
                "between_nodes_bandwidth": _A100_NET,
            },
        ),
        _H100_SXM,
        replace(
            _H100_SXM,
            name="h200",
            # fp32 is of the same die: that of the H100.
            matmul_flops={"float32": 66.9e12, "bfloat16": 989e12, "float8_e4m3fn": 1979e12},
            memory_bandwidth=4.8e12,
            memory_bytes=141e9,
            sources={
                **_H100_SXM.sources,
                **dict.fromkeys(("matmul_flops", "memory_bandwidth", "memory_bytes"), _H200),
                **dict.fromkeys(
                    ("in_node_bandwidth", "between_nodes_bandwidth", "host_link_bandwidth"),
                    _H200_SYSTEM,
                ),
            },
        ),
        replace(
            _H100_SXM,
            name="b200",
            matmul_flops={"float32": 80e12, "bfloat16": 2250e12, "float8_e4m3fn": 4500e12},
            memory_bandwidth=7.672e12,
            memory_bytes=192e9,
            in_node_bandwidth=900e9,
            sources={
                **_H100_SXM.sources,
                **dict.fromkeys(("matmul_flops", "memory_bytes", "in_node_bandwidth"), _B200),
                "memory_bandwidth": _B200_BUS,
                "between_nodes_bandwidth": _B200_NET,
                "host_link_bandwidth": ASSUMED,
            },
        ),
    )
}


def find_hardware(name: str) -> Hardware:
    """Find a GPU of the table.

    Raises:
        ValueError: it is not there, with those that are.
    """
    if name.lower() not in TABLE:
        raise ValueError(f"{name!r} is no GPU of the table; known are: {', '.join(TABLE)}")
    return TABLE[name.lower()]
