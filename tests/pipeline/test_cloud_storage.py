"""The whole graph from a bucket into a bucket, against emulators of Cloud Storage, also one that fails at random."""

import gzip
import json
from datetime import UTC, datetime, timedelta

import jax
import numpy as np
import pytest
from apache_beam.io.filesystems import FileSystems
from jax.experimental.compilation_cache import compilation_cache

from pipeline import lock
from pipeline.options import UsageError
from pipeline.output import open_output
from pipeline.report import page_of, write_report
from pipeline.show import recipe_in
from tests import cloud
from tests.fakes import RECIPE, FakeHandler, run, tree, write_jsonl
from transforms import gcs, storage
from transforms.counts import read_counts
from transforms.formats import OutputFormat
from transforms.read import InputError, InputFile, match_inputs


@pytest.fixture(params=cloud.EMULATORS)
def bucket(request):
    with cloud.emulator(request.param) as port, cloud.use(port) as name:
        yield name


@pytest.fixture
def strict():
    """A bucket of the emulator that keeps preconditions."""
    with cloud.emulator("fake-gcs-server") as port, cloud.use(port) as name:
        yield name


def test_a_run_in_a_bucket_leaves_what_a_local_run_leaves(bucket, tmp_path):
    records = [{"prompt": f"p{number}"} for number in range(9)] + [{"prompt": 42}]
    data = write_jsonl(tmp_path / "a.jsonl", records).read_bytes()
    storage.write_file(bucket, "in/d/a.jsonl", data)
    storage.write_file(bucket, "in/d/", b"")  # a "folder", as the console makes it
    handler = FakeHandler(rejected=["p3"])
    run(f"{bucket}/in/d/*.jsonl", f"{bucket}/out", handler)
    write_report(f"{bucket}/out", fresh=True)
    run(tmp_path / "a.jsonl", tmp_path / "out", handler)
    write_report(str(tmp_path / "out"), fresh=True)
    assert _tree(f"{bucket}/out") == tree(tmp_path / "out")

    run(f"{bucket}/in/d/*.jsonl", f"{bucket}/out", retry_rejected=True)
    counts = read_counts(f"{bucket}/out")
    assert (counts.finished_before, counts.written) == (8, 1)
    assert write_report(f"{bucket}/out")["output"]["rejected"] == 0

    open_output(f"{bucket}/out", RECIPE, OutputFormat())
    page = storage.read_file(page_of(f"{bucket}/out")).decode()
    assert page.count("data:image/webp") == 9 and "1 without a picture" in page
    (picture, *_) = (name for name in _tree(f"{bucket}/out") if name.endswith(".png"))
    assert json.loads(recipe_in(f"{bucket}/out/{picture}"))["checkpoint"] == RECIPE.checkpoint


def test_inputs_in_a_bucket_are_found_by_name_and_by_pattern(bucket):
    storage.write_file(bucket, "in/d/a.csv.gz", gzip.compress(b"prompt\na cat\n"))
    storage.write_file(bucket, "in/d/", b"")
    path = f"{bucket}/in/d/a.csv.gz"
    assert match_inputs([path]) == [InputFile(path, "a.csv.gz")]
    assert match_inputs([f"{bucket}/in/**"]) == match_inputs([f"{bucket}/in/*/*"]) == [InputFile(path, "d/a.csv.gz")]
    assert match_inputs([f"{bucket}/in/d/*"]) == [InputFile(path, "a.csv.gz")]
    storage.write_file(bucket, "in/t/x.txt", b"a cat\n")
    assert match_inputs([f"{bucket}/in/t/"]) == [InputFile(f"{bucket}/in/t/x.txt", "x.txt", whole=True)]
    for pattern in ("in/no.txt", "in/no*.txt"):
        with pytest.raises(InputError, match=r"no such file|matches no file"):
            match_inputs([f"{bucket}/{pattern}"])


def test_objects_are_listed_and_replaced_like_files(bucket):
    for name in ("out/a", "out/b/c", "out/b/d", "out/e/f/g", "out/"):
        storage.write_file(bucket, name, b"old")
    assert list(storage.list_files(f"{bucket}/out", "")) == list(storage.list_files(bucket, "out")) == ["a"]
    assert list(storage.list_folders(bucket, "out")) == ["b", "e"]
    assert list(storage.list_files(bucket, "no")) == list(storage.list_folders(bucket, "no")) == []
    storage.write_file(bucket, "out/a", b"new")
    storage.write_file(bucket, "out/a", b"new")
    assert storage.read_file(f"{bucket}/out/a") == b"new"
    storage.delete_files(bucket, ["out/a", "out/a", "out/never"])
    with pytest.raises(FileNotFoundError, match="out/a: no such object"):
        storage.read_file(f"{bucket}/out/a")
    with pytest.raises(OSError, match="no-such-bucket"):
        storage.write_file("gs://no-such-bucket/out", "a", b"")


def test_an_object_is_replaced_only_in_the_generation_that_was_seen(strict):
    path = f"{strict}/out/a"
    first = gcs.replace(path, b"one", 0)
    assert first and gcs.replace(path, b"two", 0) is None
    second = gcs.replace(path, b"two", first)
    assert second and second != first and gcs.replace(path, b"three", first) is None
    assert gcs.read(path).data == b"two" and gcs.read(path).generation == second


def test_one_run_at_a_time_holds_a_bucket(strict, monkeypatch):
    output = f"{strict}/out"
    with lock.hold(output):
        # As another machine sees it.
        monkeypatch.setattr(lock.socket, "gethostname", lambda: "other")
        with (
            pytest.raises(UsageError, match=r"another run is writing, by its lock .*; if it was killed"),
            lock.hold(output),
        ):
            pass
    assert list(storage.list_files(output, "")) == []
    with lock.hold(output):
        pass


def test_the_lock_of_a_killed_run_is_taken_over_at_once_here_and_later_elsewhere(strict, monkeypatch):
    output = f"{strict}/out"
    killed = lock._ObjectLock(f"{output}/{lock.FILE}")
    killed.acquire()
    with lock.hold(output):  # this process cannot be another one that runs
        pass
    killed = lock._ObjectLock(f"{output}/{lock.FILE}")
    killed.acquire()
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "other")
    monkeypatch.setattr(lock, "_STALE_AFTER", timedelta(seconds=-1))
    assert gcs.read(f"{output}/{lock.FILE}").updated < datetime.now(UTC) + timedelta(seconds=5)
    with lock.hold(output):
        assert not killed._replace(killed.generation)


def test_a_lock_that_is_held_is_renewed(strict, monkeypatch):
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 0.05)
    path = f"{strict}/out/{lock.FILE}"
    with lock.hold(f"{strict}/out"):
        first = gcs.read(path).generation
        for _ in range(200):
            if gcs.read(path).generation != first:
                break
        else:
            pytest.fail("it was not renewed")
    assert list(storage.list_files(strict, "out")) == []


@pytest.mark.parametrize(("kind", "seed"), [("folder", 1), ("parquet", 2)])
def test_a_store_that_fails_at_random_loses_nothing_and_doubles_nothing(monkeypatch, tmp_path, kind, seed):
    monkeypatch.setattr(gcs, "_RETRY", gcs._RETRY.with_delay(initial=0.05, maximum=0.2))
    assert sum(faulty_run(tmp_path, cloud.EMULATORS[0], OutputFormat(kind), share=0.2, seed=seed).values()) > 5


def faulty_run(folder, emulator, output_format, share, seed):
    """A run into a bucket of which this share of the requests fails, against one on this machine; gives the faults."""
    whole = folder / output_format.format
    handler = FakeHandler(rejected=["p3"])
    if not whole.exists():
        write_jsonl(folder / "a.jsonl", [{"prompt": f"p{number}"} for number in range(12)] + [{"prompt": 42}])
        run(folder / "a.jsonl", whole, handler, output_format=output_format)
        write_report(str(whole), fresh=True, output_format=output_format)
    public = cloud.free_port()
    with cloud.emulator(emulator, public) as port:
        with cloud.Faults(port, public, share, seed) as faults, cloud.use(public) as bucket:
            storage.write_file(bucket, "in/a.jsonl", (folder / "a.jsonl").read_bytes())
            with lock.hold(f"{bucket}/out"):
                run(f"{bucket}/in/*.jsonl", f"{bucket}/out", handler, output_format=output_format)
                write_report(f"{bucket}/out", fresh=True, output_format=output_format)
        with cloud.use(port) as bucket:
            assert _tree(f"{bucket}/out") == tree(whole)
            assert read_counts(f"{bucket}/out") == read_counts(str(whole))
    return faults.injected


def _tree(output):
    (match,) = FileSystems.match([f"{output}/**"])
    names = [metadata.path.removeprefix(f"{output}/") for metadata in match.metadata_list]
    return {
        name: storage.read_file(f"{output}/{name}")
        for name in names
        if name not in ("counts.json", "summary.json", "index.html")
    }


@pytest.fixture
def jax_cache():
    """Leaves JAX's compilation cache as it was found."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_jaxs_compilation_cache_can_be_in_a_bucket(strict, jax_cache):
    # JAX itself only warns if it cannot write there.
    jax.config.update("jax_compilation_cache_dir", f"{strict}/cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.jit(lambda x: x @ x + 1)(np.ones((2, 2)))
    assert any(name.startswith("jit__lambda") for name in gcs.children(f"{strict}/cache")[0])
