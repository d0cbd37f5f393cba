"""What a prediction assumes about the cluster: every input, with its unit and source.

Leaves out: the formulas (`collectives`, `steps`, `recovery`). Needs no torch.

Sources in brackets. "assumed" marks a plausible value that nobody measured for this code:
`benchmarks/scaling_model.py` plots what each of them changes.
"""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Run


class Cluster(Run):
    """Rates, latencies and failures. The defaults describe nodes of 8 H100 or H200."""

    gpu_tflops: float = Field(default=989.0, gt=0)
    """Matrix rate of one GPU in TFLOP/s [H100 and H200, dense bf16, datasheet]."""
    mfu: float = Field(default=0.47, gt=0, le=1)
    """Share of it that a large micro-batch reaches, without communication [by arithmetic for H/14
    as the code stands: 0.44 to 0.50; not measured]."""
    micro_batch_overhead_ms: float = Field(default=3.0, ge=0)
    """Time of a micro-batch however small it is: kernel launches, small kernels [assumed]."""
    memory_gb_s: float = Field(default=4300.0, gt=0)
    """GPU memory bandwidth, for the optimiser [H200; H100: about 2900]."""
    straggler_sigma: float = Field(default=0.01, ge=0)
    """Standard deviation of a rank's step time over its mean [assumed]."""

    nics_per_node: int = Field(default=8, gt=0)
    """Network cards of a node [DGX H100: 8]."""
    nic_gbit_s: float = Field(default=400.0, gt=0)
    """Rate of one card in Gbit/s [DGX H100: 400; DGX A100: 200]."""
    network_efficiency: float = Field(default=0.85, gt=0, le=1)
    """Share of the cards' rate that collectives reach [assumed]."""
    nvlink_gb_s: float = Field(default=370.0, gt=0)
    """Bus bandwidth of collectives inside a node in GB/s [H100, assumed; A100: about 230]."""
    overlap_share: float = Field(default=0.8, ge=0, le=1)
    """Share of the last backward pass that can hide gradient traffic [assumed]."""

    loader_images_per_core_s: float = Field(default=740.0, gt=0)
    """Images a core reads, decodes and augments [docs/benchmarks.md, ImageNet files]."""
    image_kb: float = Field(default=92.0, gt=0)
    """Mean size of an image in kB [ImageNet-21k: 1.3 TB, 14.2 M files]."""
    file_system_read_gb_s: float = Field(default=50.0, gt=0)
    """All nodes together [assumed]."""
    file_system_write_gb_s: float = Field(default=20.0, gt=0)
    """All nodes together [assumed]."""
    node_read_gb_s: float = Field(default=5.0, gt=0)
    """One node [assumed]."""
    node_write_gb_s: float = Field(default=2.0, gt=0)
    """One node [assumed]."""
    metadata_ops_s: float = Field(default=100_000.0, gt=0)
    """File system operations per second, all nodes together [assumed]."""

    scheduler_s: float = Field(default=30.0, ge=0)
    """From the start of the job to the start of Python [assumed]."""
    import_s: float = Field(default=15.0, ge=0)
    """Imports of one process on an idle file system [assumed; torch, deepspeed, timm]."""
    import_ops: int = Field(default=30_000, ge=0)
    """File system operations of a process's imports; 0: the environment is on the node's disk
    [assumed]."""
    rendezvous_ms_per_rank: float = Field(default=1.0, ge=0)
    """[TCPStore with libuv: 100 s for 96,000 ranks, PyTorch tutorial]."""
    communicator_ms_per_rank: float = Field(default=10.0, ge=0)
    """Creation of process groups [gloo 1.8: 85 s for 8,000 ranks, gloo issue 408]."""
    compile_s: float = Field(default=20.0, ge=0)
    """torch.compile where restarts find compiled code (`engine.compile_cache`); without: about 120
    [assumed]."""

    failures_per_1000_node_days: float = Field(default=6.5, gt=0)
    """Failures that end a job [Kokolis et al. 2025, table of RSC-1; RSC-2: 2.34; Llama 3 405B:
    419 in 54 days on 2,048 nodes = 3.8; OPT-175B: about 16]."""
    detection_s: float = Field(default=60.0, ge=0)
    """Until the job ends after a rank died [48 to 53 s in worlds of 16 to 512 simulated ranks:
    docs/benchmarks.md, messages between ranks]."""
    requeue_s: float = Field(default=120.0, ge=0)
    """From the end of an attempt to the start of the next [assumed: spare nodes are there]."""
    device_to_host_gb_s: float = Field(default=25.0, gt=0)
    """Copy of a checkpoint out of one GPU [PCIe 4, assumed]."""
    save_s: float = Field(default=0.1, ge=0)
    """Stop of the loop for a checkpoint beyond the copy [assumed]."""
    write_slowdown: float = Field(default=0.02, ge=0, lt=1)
    """Share by which steps are slower while a checkpoint is written [assumed]."""
