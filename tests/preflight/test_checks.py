"""Which row fails, and with which numbers, for every fault that a node can have."""

from dataclasses import replace

import pytest

from megatron_kd.config import DataConfig, ParallelConfig, PreflightConfig, RunConfig, TeacherConfig, TrainConfig
from megatron_kd.preflight.checks import check_nodes, network, table
from megatron_kd.preflight.facts import CacheFacts, CheckpointNeed, Gpu, NodeFacts, sampled_blocks

GIB = 2**30
CONFIG = RunConfig(
    run_dir="runs/x",
    teacher=TeacherConfig(model="teacher", engine="megatron", tensor=4, pipeline=2),
    data=DataConfig(source="text"),
    parallel=ParallelConfig(tensor=4, pipeline=4, expert=2),
    train=TrainConfig(global_batch=128),
    preflight=PreflightConfig(gpu_memory_gib=128.0, clock_skew=5.0, bandwidth=40.0),
)
CACHE = CacheFacts(contents="1,000 samples × 32,768, K 100", identity="a", blocks=16, decoded=4)
NODE = NodeFacts(
    host="h",
    gpus=(Gpu("NVIDIA H200", 139.8, 139.0),) * 8,
    versions={"torch": "2.13.0", "NCCL": "2.28.3"},
    disk_free=800 * GIB,
    cache=CACHE,
)
NEED = CheckpointNeed(bytes=600 * GIB, explanation="2 checkpoint(s) of 300.0 GiB")


def rows(nodes=(NODE,) * 4, config=CONFIG, job="distill", gpus=8, need=NEED):
    return {row.check: row for row in check_nodes(config, job, gpus, nodes, need)}


def with_fault(**changes):
    """Four nodes, of which the third has a fault."""
    return (NODE, NODE, replace(NODE, host="bad", **changes), NODE)


def test_four_good_nodes_pass_every_check():
    found = rows()
    assert all(row.ok for row in found.values())
    assert list(found) == [
        "GPUs", "GPU memory", "layout", "torch", "NCCL", "cache", "cache blocks", "cache decoded", "disk", "run_dir",
        "clocks",
    ]  # fmt: skip
    assert found["layout"].found == "32 ranks: TP 4 · PP 4 · CP 1 · DP 2, EP 2; batch 128"
    assert found["cache decoded"].found == "16 of 16 blocks"


@pytest.mark.parametrize(
    ("changes", "check", "found"),
    [
        ({"gpus": NODE.gpus[:7]}, "GPUs", "8 × NVIDIA H200 on node 0 (h), node 1 (h), node 3 (h); 7 × NVIDIA H200 on"),
        ({"gpus": ()}, "GPUs", "none on node 2 (bad)"),
        ({"gpus": (*NODE.gpus[:7], Gpu("NVIDIA H200", 139.8, 127.9))}, "GPU memory", "127.9 GiB free at least"),
        ({"versions": {**NODE.versions, "torch": "2.12.1"}}, "torch", "2.12.1 on node 2 (bad)"),
        ({"versions": {**NODE.versions, "NCCL": "2.27.5"}}, "NCCL", "2.27.5 on node 2 (bad)"),
        ({"cache": CacheFacts(error="/c holds no teacher cache")}, "cache", "node 2 (bad): /c holds no teacher cache"),
        ({"cache": replace(CACHE, identity="b")}, "cache", "1,000 samples"),
        ({"cache": replace(CACHE, missing=(3, 5))}, "cache blocks", "14 of 16 committed; missing: 3, 5"),
        ({"cache": replace(CACHE, damage=("block 7, array logz: …",))}, "cache decoded", "node 2 (bad): block 7"),
        ({"disk_free": 599 * GIB}, "disk", "599.0 GiB free"),
        ({"shares_run_dir": False}, "run_dir", "not seen by node 2 (bad)"),
        ({"clock": -5.5}, "clocks", "5.500 s apart, node 2 (bad) most"),
    ],
)  # fmt: skip
def test_a_fault_fails_its_row_and_names_the_node(changes, check, found):
    failed = [row for row in rows(with_fault(**changes)).values() if not row.ok]
    assert [row.check for row in failed] == [check]
    assert found in failed[0].found


@pytest.mark.parametrize(
    ("layout", "train", "nodes", "needed"),
    [
        ({"tensor": 4, "pipeline": 4, "expert": 2}, {}, 1, "ranks divide by TP · PP · CP = 16"),
        ({"tensor": 2, "pipeline": 3}, {}, 4, "ranks divide by TP · PP · CP = 6"),
        ({"tensor": 2, "context": 8}, {}, 1, "ranks divide by TP · PP · CP = 16"),
        ({"tensor": 2, "expert": 8}, {}, 1, "ranks divide by TP · PP · EP = 16"),
        ({"tensor": 2}, {"global_batch": 24}, 4, "the batch divides by DP · micro-batch = 16"),
        ({"tensor": 2}, {"global_batch": 32, "micro_batch": 4}, 4, "the batch divides by DP · micro-batch = 64"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_number(layout, train, nodes, needed):
    config = replace(CONFIG, parallel=ParallelConfig(**layout), train=TrainConfig(**train))
    row = rows((NODE,) * nodes, config)["layout"]
    assert (row.ok, row.needed) == (False, needed)


def test_the_job_that_fills_a_cache_needs_none_and_divides_by_the_teachers_ranks():
    found = rows(with_fault(cache=None), job="cache_teacher")
    assert not {"cache", "cache blocks", "disk"} & set(found)
    assert found["layout"].found == "32 ranks: TP 4 · PP 2 · 4 replica(s)"
    assert not rows((NODE,), job="cache_teacher", gpus=6)["layout"].ok


def test_a_run_on_the_cpu_needs_no_gpu_and_one_that_needs_them_does_not_settle_for_the_cpu():
    nodes = (replace(NODE, gpus=()),) * 4
    config = replace(CONFIG, parallel=ParallelConfig())
    assert rows(nodes, config, gpus=0)["GPUs"].ok
    assert not rows(nodes, config, gpus=8)["GPUs"].ok


def test_a_student_that_cannot_be_read_fails_in_the_place_of_the_disk():
    found = rows(need=CheckpointNeed(error="no such folder"))
    assert [row.check for row in found.values() if not row.ok] == ["student"]
    assert found["student"].found == "no such folder"


def test_bandwidth_fails_only_below_the_floor_asked_for():
    free = replace(CONFIG, preflight=PreflightConfig())
    assert network(free, 4, 0.1, "gloo all-reduce").ok
    assert network(CONFIG, 4, 40.1, "NCCL all-reduce").ok
    assert not network(CONFIG, 4, 39.9, "NCCL all-reduce").ok
    assert network(CONFIG, 1, None, "").ok
    assert not network(free, 4, "the nccl all-reduce failed: …", "").ok


def test_nodes_decode_different_blocks_spread_over_the_cache():
    assert [list(sampled_blocks(100, 2, node, 4)) for node in range(4)] == [[0, 50], [12, 62], [25, 75], [37, 87]]
    assert sorted(block for node in range(4) for block in sampled_blocks(10, None, node, 4)) == list(range(10))
    assert sorted(block for node in range(4) for block in sampled_blocks(3, 4, node, 4)) == [0, 1, 2]


def test_the_table_says_what_failed_first():
    lines = table(list(rows(with_fault(disk_free=0)).values())).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAILED")] == ["disk"]
    assert len({line.index("NVIDIA") for line in lines if "NVIDIA" in line}) == 1
