"""The whole graph from a bucket into a bucket, against an emulator of Cloud Storage."""

import gzip
import socket

import pytest
from apache_beam.io.filesystems import FileSystems

from pipeline.report import write_report
from tests.fakes import FakeHandler, run, tree, write_jsonl
from transforms import storage
from transforms.counts import read_counts
from transforms.read import InputError, InputFile, match_inputs

BUCKET = "gs://lightmill-test"


@pytest.fixture
def bucket(monkeypatch):
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    auth = pytest.importorskip("apache_beam.internal.gcp.auth")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    # Without this, Beam looks for credentials on the network for half a minute.
    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    monkeypatch.setattr(auth._Credentials, "_credentials", None)
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket=BUCKET.removeprefix("gs://"))
    server.start()
    yield BUCKET
    server.stop()


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


def test_inputs_in_a_bucket_are_found_by_name_and_by_pattern(bucket):
    storage.write_file(bucket, "in/d/a.csv.gz", gzip.compress(b"prompt\na cat\n"))
    storage.write_file(bucket, "in/d/", b"")
    path = f"{bucket}/in/d/a.csv.gz"
    assert match_inputs([path]) == [InputFile(path, "a.csv.gz")]
    assert match_inputs([f"{bucket}/in/**"]) == match_inputs([f"{bucket}/in/*/*"]) == [InputFile(path, "d/a.csv.gz")]
    assert match_inputs([f"{bucket}/in/d/*"]) == [InputFile(path, "a.csv.gz")]
    storage.write_file(bucket, "in/t[1]/x.txt", b"a cat\n")
    assert match_inputs([f"{bucket}/in/t[1]/"]) == [InputFile(f"{bucket}/in/t[1]/x.txt", "x.txt", whole=True)]
    for pattern in ("in/no.txt", "in/no*.txt"):
        with pytest.raises(InputError, match=r"no such file|matches no file"):
            match_inputs([f"{bucket}/{pattern}"])


def _tree(output):
    (match,) = FileSystems.match([f"{output}/**"])
    names = [metadata.path.removeprefix(f"{output}/") for metadata in match.metadata_list]
    return {
        name: storage.read_file(f"{output}/{name}")
        for name in names
        if name not in ("counts.json", "summary.json", "index.html")
    }
