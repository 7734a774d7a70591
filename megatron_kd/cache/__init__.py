"""The teacher cache: targets of a teacher that ran once, on disk or in an object store, addressed by sample.

    CacheWriter        creates, resumes and fills a cache, block by block
    TeacherCache       reads samples; Prefetcher reads ahead
    verify, repair     find damage; give damaged blocks up, so that a resumed writer fills them
    merge              join caches that were filled in different places
    stats, inspect     what is in it
    estimate           how large it will be; check_space refuses what does not fit

The format is described in docs/cache-format.md.
"""

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.chunks import DamagedChunk
from megatron_kd.cache.codecs import PRESETS
from megatron_kd.cache.decode import CacheBatch, TokenBatch
from megatron_kd.cache.encode import TARGET_NAMES, merge_draws
from megatron_kd.cache.estimate import Estimate, check_space, estimate, free_space, recommended_block
from megatron_kd.cache.inspect import inspect
from megatron_kd.cache.mend import Merged, merge, repair
from megatron_kd.cache.prefetch import Prefetcher
from megatron_kd.cache.ranks import RankTable, frequency_table, rank_table
from megatron_kd.cache.reader import TeacherCache
from megatron_kd.cache.schema import FORMAT, CacheError, Manifest, library_versions
from megatron_kd.cache.stats import Stats, stats
from megatron_kd.cache.verify import Report, verify
from megatron_kd.cache.writer import CacheExists, CacheWriter

__all__ = [
    "FORMAT",
    "PRESETS",
    "TARGET_NAMES",
    "BlockStore",
    "CacheBatch",
    "CacheError",
    "CacheExists",
    "CacheWriter",
    "DamagedChunk",
    "Estimate",
    "Manifest",
    "Merged",
    "Prefetcher",
    "RankTable",
    "Report",
    "Stats",
    "TeacherCache",
    "TokenBatch",
    "check_space",
    "estimate",
    "free_space",
    "frequency_table",
    "inspect",
    "library_versions",
    "merge",
    "merge_draws",
    "rank_table",
    "recommended_block",
    "repair",
    "stats",
    "verify",
]
