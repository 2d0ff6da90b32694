"""What the output holds is not made again, and nothing is made twice."""

import apache_beam as beam
import pytest

from tests.fakes import RECIPE, SAMPLER, collect
from transforms import progress, resume, storage
from transforms.coders import KEY_BYTES
from transforms.commits import Commit, CommitError, CommittedImage, CommittedReject, path_of
from transforms.records import PromptRecord
from transforms.requests import expand
from transforms.resume import SkipFinished


def request(number, source="a", position=1):
    (made,) = expand(PromptRecord(source, position, str(number), "a cat", {"seed": number}), RECIPE, SAMPLER)
    return made


def commit(output, shard, images=(), rejected=()):
    record = Commit(
        shard,
        tuple(CommittedImage(image.key, "0" * 64, 1) for image in images),
        tuple(CommittedReject(image.key, "not finite") for image in rejected),
    )
    storage.write_file(str(output), path_of(shard), record.to_json())


def skip(output, requests, **settings):
    outputs = collect(lambda pipeline: pipeline | beam.Create(requests) | SkipFinished(str(output), **settings))
    fates: dict[str, int] = {}
    for name, count in outputs.get("fates", []):
        fates[name] = fates.get(name, 0) + count
    return sorted(outputs.get("requests", []), key=lambda each: int(each.id)), fates


def test_in_an_empty_output_everything_is_to_be_made(tmp_path):
    requests = [request(number) for number in range(5)]
    progress.reset()
    assert skip(tmp_path, requests) == (requests, {})
    assert progress.current().planned == 5


def test_what_was_finished_or_rejected_before_is_counted_and_left_alone(tmp_path):
    requests = [request(number) for number in range(6)]
    commit(tmp_path, "a" * 20, images=requests[:2], rejected=requests[2:3])
    commit(tmp_path, "b" * 20, images=[requests[3], request(99)])
    todo, fates = skip(tmp_path, requests)
    assert todo == requests[4:]
    assert fates == {"finished_before": 3, "rejected_before": 1}


def test_rejected_requests_are_tried_again_when_asked_for_and_only_until_they_succeed(tmp_path):
    requests = [request(number) for number in range(3)]
    commit(tmp_path, "a" * 20, images=requests[:1], rejected=requests[1:])
    commit(tmp_path, "b" * 20, images=requests[1:2])
    assert skip(tmp_path, requests, retry_rejected=True) == (requests[2:], {"finished_before": 2})


def test_of_requests_for_the_same_the_first_in_the_input_is_kept(tmp_path):
    same = [request(1, "b", 1), request(1, "a", 7), request(1, "a", 3), request(1, "a", 12)]
    assert skip(tmp_path, [*same, request(2)]) == ([same[2], request(2)], {"duplicates": 3})
    commit(tmp_path, "a" * 20, images=same[:1])
    assert skip(tmp_path, same) == ([], {"duplicates": 3, "finished_before": 1})


@pytest.mark.parametrize("keys", [0, 1, 5])
def test_an_output_of_more_pictures_than_workers_are_told_of_is_joined_to_the_same_end(tmp_path, monkeypatch, keys):
    monkeypatch.setattr(resume, "_MAX_KNOWN_BYTES", keys * KEY_BYTES)
    monkeypatch.setattr(resume, "_LOT", 3)
    requests = [request(number) for number in range(8)]
    commit(tmp_path, "a" * 20, images=requests[:5], rejected=requests[5:6])
    commit(tmp_path, "b" * 20, images=[requests[5], request(99)])
    twice = [*requests, request(0, position=2), request(7, position=2)]
    assert skip(tmp_path, twice) == (requests[6:], {"duplicates": 2, "finished_before": 6})


def test_of_a_finished_request_nothing_but_its_key_is_joined(monkeypatch):
    monkeypatch.setattr(resume, "_LOT", 3)
    requests = [request(number) for number in range(7)]
    written = [(0, b"+" + bytes.fromhex(each.key)) for each in requests[1:]]

    def build(pipeline):
        finished = beam.pvalue.AsIter(pipeline | "Finished" >> beam.Create(written))
        given = pipeline | "Requests" >> beam.Create([*requests, requests[1]])
        return given | beam.ParDo(resume._SetAside(), finished).with_outputs("known", main="unknown")

    outputs = collect(build)
    assert outputs["unknown"] == requests[:1]
    asked = [requests[place].key for place in (1, 1, 2, 3, 4, 5, 6)]
    keys = [
        entry[place : place + KEY_BYTES] for _, entry in outputs["known"] for place in range(1, len(entry), KEY_BYTES)
    ]
    assert sorted(key.hex() for key in keys) == sorted(asked)


def test_the_same_id_with_changed_content_is_a_new_image(tmp_path):
    before = request(1)
    commit(tmp_path, "a" * 20, images=[before])
    (changed,) = expand(PromptRecord("a", 1, "1", "a dog", {"seed": 1}), RECIPE, SAMPLER)
    assert skip(tmp_path, [changed]) == ([changed], {})


def test_a_broken_commit_record_stops_the_run(tmp_path):
    storage.write_file(str(tmp_path), path_of("a" * 20), b"{")
    with pytest.raises(Exception, match="is not a commit record") as error:
        skip(tmp_path, [request(1)])
    assert isinstance(error.value, CommitError) or "CommitError" in repr(error.value) + str(error.value)
