"""Text to blocks, and blocks to workers: nothing lost, nothing seen twice, nothing left to chance."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lordo.trainer.data import blocks, limit, list_files, load_blocks, split, spread
from lordo.trainer.data_config import DataConfig
from lordo.trainer.shard import Shard


def tree(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def novels(root: Path, num: int = 20) -> Path:
    """Files that differ in every byte from one another: file i is 10 to 90 times one letter."""
    return tree(root, {f"n{i:02}.txt": chr(ord("A") + i) * (10 + 7 * i % 81) for i in range(num)})


def config(*sources: Path | str, **settings) -> DataConfig:
    return DataConfig(source=[str(source) for source in sources], **{"sequence_length": 8, **settings})


def names(files) -> list[str]:
    return [file.name for file in files]


# ---- which files


def test_a_folder_gives_its_text_files_below_sorted_by_name(tmp_path):
    tree(tmp_path, {"b/x.py": "1", "a.MD": "2", "c.txt": "3", "d.bin": "4", "empty.txt": "", ".git/x.txt": "5", "b/.h.py": "6"})
    found = list_files([str(tmp_path)])
    assert names(found) == ["a.MD", "b/x.py", "c.txt"]
    assert [file.num_bytes for file in found] == [1, 1, 1]


def test_a_file_is_taken_whatever_its_name_and_once(tmp_path):
    tree(tmp_path, {"a.txt": "1", "b.tex": "2"})
    assert names(list_files([str(tmp_path), str(tmp_path / "b.tex"), str(tmp_path / "a.txt")])) == ["a.txt", "b.tex"]


def test_the_standard_library_without_tests_packages_and_what_a_build_wrote():
    found = names(list_files("stdlib"))
    assert {"argparse.py", "json/decoder.py", "__future__.py"} <= set(found)
    assert found == sorted(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [part for part in parts if part.startswith(("_sysconfigdata", "config-"))]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere.txt", "data.source: '.*nowhere.txt' does not exist; give a file or folder, as seen from "),
        ("empty.txt", "data.source: the file '.*empty.txt' is empty; leave it out"),
        ("folder", "data.source: the folder '.*folder' has no text; it needs a non-empty file in one of .md, .py, .txt"),
    ],
)
def test_a_source_without_text(tmp_path, source, sentence):
    tree(tmp_path, {"empty.txt": "", "folder/image.png": "1", "folder/empty.py": ""})
    with pytest.raises(ValueError, match=sentence):
        list_files([str(tmp_path / source)])


@pytest.mark.parametrize("content", [b"text\0text", "text".encode("utf-16"), b"x" * (3 << 20) + b"\0"], ids=["zero", "utf-16", "late"])
def test_a_binary_file(tmp_path, content):
    tree(tmp_path, {"a.txt": "some text", "b.txt": content})
    with pytest.raises(ValueError, match=r"data.source: .*b.txt is not text, for it has a zero byte; leave it out or save it as UTF-8"):
        load_blocks(config(tmp_path), 0)


def test_a_limit_takes_whole_files_that_fit(tmp_path):
    files = list_files([str(novels(tmp_path))])
    for max_bytes in (20, 100, 500, 10**6):
        taken = limit(files, max_bytes)
        assert 0 < sum(file.num_bytes for file in taken) <= max_bytes
        left = max_bytes - sum(file.num_bytes for file in taken)
        assert all(file.num_bytes > left for file in files if file not in taken)
    assert taken == files == limit(files, None)


def test_a_limit_is_a_mixture_and_says_when_nothing_fits(tmp_path):
    files = list_files([str(novels(tmp_path))])
    taken = limit(files, 300)
    assert taken != files[: len(taken)]
    with pytest.raises(ValueError, match=r"data.max_bytes = 9 is less than the smallest file has \(10 bytes, .*n00.txt\); raise it"):
        limit(files, 9)


# ---- the split


def test_a_split_is_by_file_about_the_fraction_and_follows_the_seed(tmp_path):
    files = list_files([str(tree(tmp_path, {f"{i}.txt": "text" for i in range(400)}))])
    splits = [split(files, fraction=0.1, seed=seed) for seed in range(3)]
    for train, validation in splits:
        assert sorted([*names(train), *names(validation)]) == names(files)
        assert 20 <= len(validation) <= 60  # 40 expected, standard deviation 6
    assert len({tuple(names(validation)) for _, validation in splits}) == 3


@given(num=st.integers(2, 12), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 99))
def test_each_side_has_a_file(tmp_path_factory, num, fraction, seed):
    files = list_files([str(novels(tmp_path_factory.mktemp("split"), num))])
    train, validation = split(files, fraction=fraction, seed=seed)
    assert train
    assert validation


def test_files_that_join_leave_the_side_of_the_others(tmp_path):
    before = split(list_files([str(novels(tmp_path, 20))]), fraction=0.3, seed=5)
    after = split(list_files([str(novels(tmp_path, 26))]), fraction=0.3, seed=5)
    assert all(len(side) > 1 for side in (*before, *after))
    assert set(before[0]) <= set(after[0])
    assert set(before[1]) <= set(after[1])


def test_files_of_one_name_in_two_folders_are_two_files(tmp_path):
    tree(tmp_path, {"a/x.txt": "first one", "b/x.txt": "second one"})
    files = list_files([str(tmp_path / "b"), str(tmp_path / "a")])
    assert [file.path.parent.name for file in files] == ["b", "a"]
    assert [len(side) for side in split(files, fraction=0.5, seed=0)] == [1, 1]


def test_one_file_cannot_be_split(tmp_path):
    tree(tmp_path, {"a.txt": "some text"})
    with pytest.raises(ValueError, match=r"data.source gives one file \(.*a.txt\), but .* come from different files; give at least two"):
        load_blocks(config(tmp_path), 0)


# ---- tokens and blocks


def test_the_blocks_are_the_documents_with_separators(tmp_path):
    splits = load_blocks(config(novels(tmp_path), validation_fraction=0.3), seed=1)
    train, validation = split(list_files([str(tmp_path)]), fraction=0.3, seed=1)
    trained, kept = (train, splits.train[0].blocks, splits.train_bytes), (validation, splits.validation, splits.validation_bytes)
    for side, got, num_bytes in (trained, kept):
        stream = b"".join(file.path.read_bytes() + b"\0" for file in side)
        assert bytes(got.flatten().tolist()) == stream[: len(stream) // 8 * 8]
        assert num_bytes == len(stream) - len(side)
        assert got.dtype == torch.uint8
        assert got.shape[1] == 8
    assert (splits.num_train_documents, splits.num_validation_documents) == (len(train), len(validation))


def test_no_file_has_text_on_both_sides(tmp_path):
    splits = load_blocks(config(novels(tmp_path), validation_fraction=0.4), seed=2)
    assert set(splits.train[0].blocks.unique().tolist()) & set(splits.validation.unique().tolist()) == {0}


def test_any_bytes_are_read_as_utf8_and_line_ends_as_newlines(tmp_path):
    tree(tmp_path, {"a.txt": b"caf\xe9\r\nx", "b.txt": "na\u00efve"})
    splits = load_blocks(config(tmp_path, sequence_length=2), seed=0)
    read = bytes(torch.cat([splits.train[0].blocks.flatten(), splits.validation.flatten()]).tolist())
    assert "caf\ufffd\nx".encode() in read
    assert "na\u00efve".encode() in read


def test_names_with_wildcards_are_only_names(tmp_path):
    tree(tmp_path, {"a[1]*?.txt": "AAAAAAAAA", "a1x.txt": "BBBBBBBBB", "__d/.e/c.txt": "CCCCCCCCC"})
    files = [tmp_path / "a[1]*?.txt", tmp_path / "a1x.txt", tmp_path / "__d" / ".e" / "c.txt"]
    splits = load_blocks(config(*files), seed=0)
    assert splits.num_train_documents + splits.num_validation_documents == 3
    assert set(torch.cat([splits.train[0].blocks, splits.validation]).unique().tolist()) == set(b"ABC\0")


def test_the_same_bits_in_any_process(tmp_path):
    novels(tmp_path)
    here = load_blocks(config(tmp_path), seed=3)
    code = (
        "import sys, hashlib; from lordo.trainer.data_config import DataConfig; "
        "from lordo.trainer.data import load_blocks; from lordo.trainer.shard import Shard; "
        "s = load_blocks(DataConfig(source=[sys.argv[1]], sequence_length=8), 3); "
        "train = s.train[0].blocks; batch = Shard(train, 1, 3, 7).batch(5, 40); "
        "print(hashlib.sha256(train.numpy().tobytes() + batch.numpy().tobytes()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True)
    bits = here.train[0].blocks.numpy().tobytes() + Shard(here.train[0].blocks, 1, 3, 7).batch(5, 40).numpy().tobytes()
    assert there.stdout.strip() == hashlib.sha256(bits).hexdigest()


def test_a_cache_is_used_only_while_the_text_is_the_same(tmp_path):
    text, cache = novels(tmp_path / "text"), tmp_path / "cache"
    first, second = (load_blocks(config(text), 0, cache) for _ in range(2))
    assert torch.equal(first.train[0].blocks, second.train[0].blocks)
    assert list(cache.rglob("*.arrow"))
    for path in text.iterdir():
        path.write_text(path.read_text().lower())
        os.utime(path, (2e9, 2e9))
    third = load_blocks(config(text), 0, cache)
    assert bytes(third.train[0].blocks.flatten().tolist()) == bytes(first.train[0].blocks.flatten().tolist()).lower()


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    novels(tmp_path / "text")
    for place in ("home", "temporary"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home" / "cache")
    shown = datasets.is_progress_bar_enabled()
    load_blocks(config(tmp_path / "text"), 0)
    assert datasets.is_progress_bar_enabled() is shown
    assert not list((tmp_path / "home").rglob("*.arrow"))
    assert not list((tmp_path / "temporary").iterdir())


def test_too_little_text_for_a_block(tmp_path):
    tree(tmp_path, {"a.txt": "abc", "b.txt": "defg"})
    with pytest.raises(ValueError, match=r"the train text has [45] tokens, fewer than one block of data.sequence_length = 8; lower that"):
        load_blocks(config(tmp_path), 0)


def test_the_last_tokens_too_few_for_a_block_are_left_out():
    assert blocks(torch.arange(11), 3, side="train").tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_spread_takes_blocks_at_even_distances():
    ten = torch.arange(10)[:, None]
    assert spread(ten, 5).flatten().tolist() == [0, 2, 4, 6, 8]
    assert spread(ten, 3).flatten().tolist() == [0, 3, 6]
    assert torch.equal(spread(ten, None), ten)
    assert torch.equal(spread(ten, 10), ten)
    with pytest.raises(ValueError, match="cannot take 11 of 10 blocks"):
        spread(ten, 11)


# ---- shards


def numbered(num: int) -> torch.Tensor:
    """Blocks that hold their own number."""
    return torch.arange(num, dtype=torch.uint8)[:, None].expand(num, 3)


def used(shard: Shard, position: int, size: int) -> list[int]:
    return shard.batch(position, size)[:, 0].tolist()


sizes = {"num_workers": st.integers(1, 7), "more": st.integers(0, 40), "seed": st.integers(0, 2**40)}


@given(**sizes)
def test_shards_are_disjoint_and_exhaustive(num_workers, more, seed):
    num = num_workers + more
    shards = [Shard(numbered(num), worker, num_workers, seed) for worker in range(num_workers)]
    assert sorted(number for shard in shards for number in used(shard, 0, len(shard))) == list(range(num))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(**sizes, size=st.integers(1, 9))
def test_each_block_once_an_epoch_in_batches_of_any_size(num_workers, more, seed, size):
    shard = Shard(numbered(num_workers + more), 0, num_workers, seed)
    length = len(shard)
    stream = [number for position in range(0, 3 * length, size) for number in used(shard, position, size)]
    epochs = [stream[start : start + length] for start in range(0, 3 * length, length)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == length


def test_a_batch_goes_on_into_the_next_epochs():
    shard = Shard(numbered(5), 0, 1, 0)
    stream = [number for position in range(15) for number in used(shard, position, 1)]
    assert used(shard, 3, 4) == stream[3:7]
    assert used(shard, 2, 13) == stream[2:]  # over two ends


def test_each_epoch_has_an_order_of_its_own_and_so_has_each_seed():
    shard = Shard(numbered(200), 0, 2, 0)
    epochs = [used(shard, start, 100) for start in (0, 100, 200)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])
    assert set(used(Shard(numbered(200), 0, 2, 1), 0, 100)) != set(epochs[0])


def test_where_it_stands_is_one_integer():
    straight, resumed = Shard(numbered(50), 1, 3, 9), Shard(numbered(50), 1, 3, 9)
    for position in range(0, 60, 4):
        straight.batch(position, 4)
    assert used(straight, 60, 4) == used(resumed, 60, 4)
    assert used(straight, 0, 4) == used(resumed, 0, 4)


def test_a_batch_is_int64_of_its_own():
    blocks = numbered(8).clone()
    batch = Shard(blocks, 0, 1, 0).batch(0, 2)
    assert batch.dtype == torch.int64
    assert batch.shape == (2, 3)
    batch.zero_()
    assert torch.equal(blocks, numbered(8))


def test_global_random_numbers_are_untouched(tmp_path):
    novels(tmp_path)
    torch.manual_seed(0)
    np.random.seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Shard(load_blocks(config(tmp_path), 0).train[0].blocks, 0, 2, 0).batch(3, 100)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_fewer_blocks_than_workers():
    with pytest.raises(ValueError, match=r"3 blocks \(9 tokens of training text in all\) are too few for 4 workers; lower workers or "):
        Shard(numbered(3), 0, 4, 0)


def test_a_worker_that_does_not_exist():
    with pytest.raises(ValueError, match="worker = 4 of 4 does not exist; give one from 0 to 3"):
        Shard(numbered(9), 4, 4, 0)


@pytest.mark.parametrize(("position", "size"), [(-1, 2), (0, 0)])
def test_a_batch_that_cannot_be(position, size):
    with pytest.raises(ValueError, match="give a position from 0 on and a size from 1 on"):
        Shard(numbered(9), 0, 1, 0).batch(position, size)
