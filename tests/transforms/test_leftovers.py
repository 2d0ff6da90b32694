"""What a killed run left goes, and nothing else."""

from pathlib import Path

from transforms.leftovers import clear_leftovers


def test_leftovers_of_a_killed_run_go_and_nothing_else_does(tmp_path):
    done, killed = "d" * 20, "e" * 20
    keep = [
        f"images/{done}/{'1' * 32}.png",
        f"images/{killed}/holiday.png",
        "images/mine/" + "2" * 32 + ".png",
        f"commits/{done}.json",
        f"rejects/{done}.jsonl",
        "rejects/mine.jsonl",
        f"shards/{done}.tar",
        f"shards/{killed}.txt",
    ]
    leftovers = [
        f"images/{killed}/{'3' * 32}.png",
        f"images/{killed}/{'4' * 32}.jpg",
        f"images/{killed}/metadata.jsonl",
        f"rejects/{killed}.jsonl",
        f"shards/{killed}.tar",
        f"shards/{killed}.parquet",
    ]
    for name in [*keep, *leftovers, ".tmp/half"]:
        path = Path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    clear_leftovers(str(tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(keep)
