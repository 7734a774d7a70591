"""The teacher cache: targets of a teacher that ran once, on disk or in an object store, addressed by sample."""

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.chunks import DamagedChunk
from megatron_kd.cache.encode import TARGET_NAMES, label_agrees
from megatron_kd.cache.ranks import RankTable, frequency_table, rank_table
from megatron_kd.cache.reader import CacheBatch, TeacherCache
from megatron_kd.cache.schema import FORMAT, CacheError, Manifest, library_versions
from megatron_kd.cache.verify import Report, verify
from megatron_kd.cache.writer import CacheExists, CacheWriter

__all__ = [
    "FORMAT",
    "TARGET_NAMES",
    "BlockStore",
    "CacheBatch",
    "CacheError",
    "CacheExists",
    "CacheWriter",
    "DamagedChunk",
    "Manifest",
    "RankTable",
    "Report",
    "TeacherCache",
    "frequency_table",
    "label_agrees",
    "library_versions",
    "rank_table",
    "verify",
]
