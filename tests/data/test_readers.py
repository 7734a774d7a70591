"""Tables and Megatron's data sets, written by the libraries that define the formats."""

import json

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_kd.data.document import SourceError
from megatron_kd.data.sources import iterate_documents, source_hash
from tests.data.texts import sentences

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_a_megatron_data_set(tmp_path, dtype):
    """Documents of one and of several sequences; the largest id of the type among them."""
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=dtype)
    builder.add_document(torch.tensor([1, 2, largest]), [3])
    builder.add_document(torch.tensor([4, 5, 6, 7]), [1, 3])
    builder.finalize(str(tmp_path / "set.idx"))
    for source in ("set", "set.bin", "set.idx", "."):
        documents = list(iterate_documents(str(tmp_path / source)))
        assert [document.tolist() for document in documents] == [[1, 2, largest], [4, 5, 6, 7]]
        assert documents[0].dtype == np.int32
    (tmp_path / "set.bin").write_bytes((tmp_path / "set.bin").read_bytes()[:-1])
    with pytest.raises(SourceError, match="do not belong together"):
        list(iterate_documents(str(tmp_path / "set")))
    (tmp_path / "set.idx").write_bytes((tmp_path / "set.idx").read_bytes()[:-1])
    with pytest.raises(SourceError, match="cut short"):
        list(iterate_documents(str(tmp_path / "set")))
    (tmp_path / "set.idx").unlink()
    with pytest.raises(SourceError, match=r"its index set\.idx is not beside it"):
        list(iterate_documents(str(tmp_path / "set")))


def test_what_is_no_index_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    for content in (b"", b"x" * 64):
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(SourceError, match=r"x\.idx: "):
            list(iterate_documents(str(tmp_path / "x")))


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"text": sentences(7), "chat": [CHAT] * 7}), file, row_group_size=3)
    assert list(iterate_documents(str(file))) == sentences(7)
    assert list(iterate_documents(str(file), "chat")) == [CHAT] * 7
    with pytest.raises(SourceError, match=r"no field 'body', found \['chat', 'text'\]"):
        list(iterate_documents(str(file), "body"))
    file.write_bytes(b"no table")
    with pytest.raises(SourceError, match="not a Parquet file"):
        list(iterate_documents(str(file)))


def test_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": sentences(9), "chat": [CHAT] * 9}).select(range(8, 1, -1))
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    assert list(iterate_documents(str(tmp_path / "one"))) == sentences(9)[8:1:-1]
    assert list(iterate_documents(str(tmp_path / "one"), "chat")) == [CHAT] * 7
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    with pytest.raises(SourceError, match=r"splits \['train', 'test'\]; give one of them"):
        list(iterate_documents(str(tmp_path / "two")))
    assert list(iterate_documents(str(tmp_path / "two" / "train"))) == sentences(9)[8:1:-1]
    assert source_hash(str(tmp_path / "two" / "train")) == source_hash(str(tmp_path / "two" / "test"))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match="pip install pyarrow"):
        list(iterate_documents(str(tmp_path / "t.parquet")))


def test_records_of_a_table_say_their_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": None}) + "\n")
    with pytest.raises(SourceError, match=r"a\.jsonl, line 1: 'text' holds None"):
        list(iterate_documents(str(tmp_path / "a.jsonl")))
