"""Whether there is anything to do at all, for schedulers that run the same command every night.

The summary of a run that went through to its end keeps a hash of the inputs that it read and one of the shards that
were there afterwards. If both are still the same, every record has the fate that it had, and no model need be loaded to
find that out.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from transforms import commits, counts, storage
from transforms.counts import Counts
from transforms.read import find_inputs

# Local files are read whole to be hashed, a second or two for this much; of more we do not know.
_MAX_LOCAL_BYTES = 1 << 30


def inputs_hash(patterns: Sequence[str], prompt_column: str | None, id_column: str | None) -> str | None:
    """A hash of everything that a run reads of its inputs, or None if it would take long to tell."""
    total = hashlib.sha256(json.dumps([prompt_column, id_column]).encode())
    read = 0
    for file in find_inputs(patterns):
        if storage.is_local(file.path):
            read += Path(file.path).stat().st_size
            if read > _MAX_LOCAL_BYTES:
                return None
            with Path(file.path).open("rb") as stored:
                content = hashlib.file_digest(stored, "sha256").hexdigest()
        else:
            try:
                content = str(FileSystems.checksum(file.path))
            except BeamIOError:
                return None
        total.update(json.dumps([file.source, file.whole, content]).encode())
    return total.hexdigest()


def shards_hash(output: str) -> str:
    """A hash of the names of the shards in an output, which are hashes of what is in them."""
    names = (path.rpartition("/")[2] for path in commits.list_commits(output))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def still_finished(output: str, inputs: str | None, retry_rejected: bool) -> dict[str, Any] | None:
    """The summary of a run that would do nothing, with its counts written; None if there may be something to do."""
    try:
        summary = json.loads(storage.read_file(storage.join(output, "summary.json")))
        run, before = summary["run"], Counts(**summary["counts"])
        same = inputs is not None and run["inputs"] == inputs and run["shards"] == shards_hash(output)
        rejected = before.rejected + before.rejected_before
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not same or (retry_rejected and rejected):
        return None
    finished = dataclasses.replace(
        before,
        finished_before=before.finished_before + before.written,
        rejected_before=rejected,
        **dict.fromkeys(("written", "rejected", *counts.BESIDES_FATES), 0),
    )
    kept = {name: run[name] for name in ("inputs", "shards", "model_flags") if name in run}
    summary = {**summary, "counts": dataclasses.asdict(finished), "run": {"seconds": 0.0, **kept}}
    storage.write_file(output, counts.FILE, finished.to_json())
    storage.write_file(output, "summary.json", json.dumps(summary, indent=1).encode() + b"\n")
    return summary
