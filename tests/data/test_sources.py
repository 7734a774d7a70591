"""Documents come in one order, and bad input is named by file and line."""

import json

import pytest

from megatron_kd.data.document import SourceError
from megatron_kd.data.sources import iterate_documents, source_hash


def test_a_text_file_is_one_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n", encoding="utf-8")
    assert list(iterate_documents(str(file))) == ["one\ntwo\n"]


def test_a_folder_is_read_by_relative_path_without_hidden_files(tmp_path):
    for name, text in {"b.txt": "2", "a/z.txt": "1", "c/a.txt": "3", ".git/x": "no", "c/.hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "c" / "b.jsonl").write_text(json.dumps({"text": "4"}), encoding="utf-8")
    assert list(iterate_documents(str(tmp_path))) == ["1", "2", "3", "4"]


def test_jsonl_reads_the_field_and_skips_empty_documents(tmp_path):
    file = tmp_path / "a.jsonl"
    # A line separator inside a string is no end of line for JSON Lines.
    records = [{"body": "x\u2028y"}, {"body": "  "}, {"body": "z"}]
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n", encoding="utf-8")
    assert list(iterate_documents(str(file), "body")) == ["x\u2028y", "z"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'a': 1}", "line 2: not JSON"),
        ('{"body": 1}', r"line 2: no field 'text', found \['body'\]; set data.field"),
        ('{"text": [1, 2]}', r"line 2: 'text' holds \[1, 2\]; needed is text, or a list of messages"),
        ("3", "line 2: no field 'text', found int"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SourceError, match=message):
        list(iterate_documents(str(file)))


def test_missing_empty_and_binary_sources_are_refused(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        list(iterate_documents(str(tmp_path / "absent")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no file"):
        list(iterate_documents(str(tmp_path / "empty")))
    (tmp_path / "binary.txt").write_bytes(b"ab\xff\xfe")
    with pytest.raises(SourceError, match=r"binary\.txt: not UTF-8 text \(byte 2\)"):
        list(iterate_documents(str(tmp_path / "binary.txt")))


def test_python_docs_are_the_topics_in_order():
    from pydoc_data.topics import topics

    documents = list(iterate_documents("python-docs"))
    assert documents == [topics[name] for name in sorted(topics)]
    assert "assert" in documents[0]


def test_the_hash_follows_the_bytes_and_not_the_place(tmp_path):
    for name, text in {"a": "text", "b": "text", "c": "tex!"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.txt").write_text(text, encoding="utf-8")
    hashes = [source_hash(str(tmp_path / name)) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
