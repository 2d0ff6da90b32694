"""What a killed run left behind, found by its names."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from transforms import commits, rejects, storage

# Those that are generated have a hash for a name, those that are packed a number.
_SHARD = re.compile(r"[0-9a-f]{20}|[0-9]{6}")
_PICTURE = re.compile(r"[0-9a-f]{32}\.(png|jpg|webp)|metadata\.jsonl")
_FILE = re.compile(r"([0-9a-f]{20}|[0-9]{6})\.(tar|parquet|jsonl)")


def clear_leftovers(output: str) -> None:
    """Removes from a local output temporary files, and the files of shards that do not count.

    To be called while nothing writes there. On Cloud Storage there are no temporary files, and listing every picture
    would cost more than the leftovers: a resumed run writes over them. Only files with a shard's own names go: this may
    be a folder in which a person keeps other things too.
    """
    if storage.is_local(output):
        with storage.writing(output, alone=True):
            _clear(output)


def _clear(output: str) -> None:
    shutil.rmtree(storage.join(output, storage.TEMPORARY), ignore_errors=True)
    committed = {Path(path).stem for path in commits.list_commits(output)}
    for shard in Path(output, "images").glob("*/"):
        if _SHARD.fullmatch(shard.name) and shard.name not in committed:
            for file in shard.iterdir():
                if _PICTURE.fullmatch(file.name):
                    file.unlink()
            with suppress(OSError):
                shard.rmdir()
    for folder in ("shards", rejects.FOLDER):
        for name in storage.list_files(output, folder):
            match = _FILE.fullmatch(name)
            if match and match[1] not in committed:
                Path(output, folder, name).unlink()
