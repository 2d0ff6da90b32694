"""The command line: `lightmill generate ...`, which is also `python -m pipeline generate ...`."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

# Before anything imports transformers, which says at length that it has no PyTorch and that this is no error.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from pipeline.job import JobError, generate
from pipeline.options import EXIT_STATUS, GenerateOptions, UsageError, add_generate_flags, beam_options

log = logging.getLogger("lightmill")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; see `generate --help`."""
    parser = argparse.ArgumentParser(
        prog="lightmill", description="Millions of prompts in, a dataset of images out.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="make a picture of every prompt of a file",
        description="Makes a picture of every prompt of a file, or goes on where an earlier run stopped.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_generate_flags(command)
    known, others = parser.parse_known_args(arguments)
    values = {name: value for name, value in vars(known).items() if name != "command"}
    options = GenerateOptions(**values)
    _set_up_logging(options.verbose)
    try:
        return generate(options, beam_options(others, list(command._option_string_actions)))
    except (UsageError, JobError) as error:
        if options.verbose:
            traceback.print_exc()
        print(f"lightmill: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("lightmill: interrupted; the same command goes on from the last finished shard", file=sys.stderr)
        return 130


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s", force=True)
    log.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
