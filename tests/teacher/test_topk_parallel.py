"""The same logits give the same bytes under every tensor-parallel size."""

import pytest
import torch
import torch.distributed as dist

from megatron_kd.teacher.engine import Head
from megatron_kd.teacher.topk import targets_of_logits, topk_targets
from megatron_kd.teacher.vocabulary import VocabularyShard
from tests.distributed import run_ranks

TEMPERATURES = (1.0, 0.5, 3.0)
# (vocabulary, rows a rank, K): a vocabulary that ends inside the last rank's rows, one that leaves a rank none at all,
# and K beyond what one rank holds.
CASES = {2: [(1000, 512, 100), (200, 128, 150), (129, 128, 129)], 4: [(1000, 256, 100), (300, 128, 64)]}


def dense_logits(vocab_size, rounded):
    """[40, V] logits, the same on every rank; `rounded` to bf16, so that entries tie."""
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    return logits.bfloat16().float() if rounded else logits


def labels_of(vocab_size):
    return torch.arange(40) * 7919 % vocab_size


def shard_of(logits, rank, rows, group):
    """This rank's columns, padded with −inf to its rows."""
    vocab_size = logits.shape[1]
    mine = torch.full((len(logits), rows), -torch.inf)
    columns = max(min(vocab_size - rank * rows, rows), 0)
    mine[:, :columns] = logits[:, rank * rows : rank * rows + columns]
    return mine, VocabularyShard(rank * rows, columns, vocab_size, group)


def targets_on_a_rank(rank, ranks):
    """Of every case: targets of the sharded logits, and of the sharded head."""
    results = []
    for vocab_size, rows, k in CASES[ranks]:
        for rounded in (False, True):
            mine, shard = shard_of(dense_logits(vocab_size, rounded), rank, rows, dist.group.WORLD)
            results.append(targets_of_logits(mine, labels_of(vocab_size), shard, k=k, temperatures=TEMPERATURES))
        hidden, head = hidden_and_head(vocab_size, rows * ranks)
        head = Head(head.weight[rank * rows : (rank + 1) * rows], head.bias[rank * rows : (rank + 1) * rows])
        arguments = {"k": k, "vocab_size": vocab_size, "temperatures": TEMPERATURES, "chunk_tokens": 16}
        results.append(topk_targets(hidden, head, labels_of(vocab_size), group=dist.group.WORLD, **arguments))
    return [[part.numpy() for part in targets] for targets in results]


def hidden_and_head(vocab_size, rows):
    """[40, 16] hidden states and a padded head with a bias; integers, so that every summation order is exact."""
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randint(-3, 4, (40, 16), generator=random).float()
    weight = torch.randint(-3, 4, (rows, 16), generator=random) / 8
    bias = torch.randint(-3, 4, (rows,), generator=random) / 8
    weight[vocab_size:], bias[vocab_size:] = 50, 50
    return hidden, Head(weight, bias)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_give_the_bytes_of_one(ranks):
    """All arrays, on every rank, bit for bit; of logits that tie, and of a head projected on every rank."""
    found = run_ranks(targets_on_a_rank, ranks)
    expected = []
    for vocab_size, rows, k in CASES[ranks]:
        width = -(-vocab_size // 128) * 128
        for rounded in (False, True):
            logits, shard = shard_of(dense_logits(vocab_size, rounded), 0, width, None)
            expected.append(targets_of_logits(logits, labels_of(vocab_size), shard, k=k, temperatures=TEMPERATURES))
        hidden, head = hidden_and_head(vocab_size, rows * ranks)
        arguments = {"k": k, "vocab_size": vocab_size, "temperatures": TEMPERATURES, "chunk_tokens": 40}
        expected.append(topk_targets(hidden, head, labels_of(vocab_size), **arguments))
    for on_rank in found:
        for targets, wanted in zip(on_rank, expected):
            for part, array, name in zip(wanted, targets, wanted._fields):
                assert array.tobytes() == part.numpy().tobytes(), name
    assert expected[0].logz.isfinite().all()


def test_rows_that_cut_a_block_of_the_sum_are_refused():
    with pytest.raises(ValueError, match="100 rows on each of 2 ranks; a multiple of 128 is needed"):
        raise run_ranks(_uneven_rows, 2)[0]


def _uneven_rows(rank, ranks):
    try:
        topk_targets(torch.zeros(1, 4), Head(torch.zeros(100, 4)), torch.zeros(1).long(), k=1, vocab_size=150,
                     group=dist.group.WORLD)  # fmt: skip
    except ValueError as error:
        return error
