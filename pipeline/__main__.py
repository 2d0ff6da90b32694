"""The command line: `lightmill generate ...`, which is also `python -m pipeline generate ...`."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

# Before anything imports transformers, which says at length that it has no PyTorch and that this is no error.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from model_handlers.topologies import quiet_libtpu
from pipeline.job import JobError, generate
from pipeline.options import (
    EXIT_STATUS,
    GenerateOptions,
    PlanOptions,
    UsageError,
    add_generate_flags,
    add_pack_flags,
    add_plan_flags,
    add_report_flags,
    add_selftest_flags,
    add_show_flags,
    add_verify_flags,
    beam_options,
)
from pipeline.pack import PackError, pack
from pipeline.plan import plan
from pipeline.report import page_of
from pipeline.selftest import self_test
from pipeline.show import recipe_in
from pipeline.verify import verify
from pipeline.watch import CLEAR

log = logging.getLogger("lightmill")

# What libraries log without --verbose and what helps nobody: the logger's name and how the message begins.
MEANINGLESS = (
    # Beam's RunInference on every machine, for want of an import; it would only have measured memory.
    ("root", "Resource module is not available"),
    # Pages of tracebacks of a job that fails, whose cause the user is told in a line.
    ("apache_beam.runners.common", ""),
    ("apache_beam.runners.worker.sdk_worker", ""),
    ("apache_beam.runners.worker.data_plane", ""),
    ("apache_beam.runners.portability.local_job_service", ""),
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line, as every other error is said, and not under a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lightmill: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; see `generate --help`."""
    parser = _Parser(
        prog="lightmill", description="Millions of prompts in, a dataset of images out.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generating = commands.add_parser(
        "generate",
        help="make a picture of every prompt of a file",
        description="Makes a picture of every prompt of a file, or goes on where an earlier run stopped.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_generate_flags(generating)
    add_plan_flags(
        commands.add_parser(
            "plan",
            help="estimate what a job will take on TPUs, without one",
            description="Compiles the programs of a job for a TPU, on any machine and without weights, and estimates "
            "from them whether they fit, how fast they are and what the pictures would cost.",
            allow_abbrev=False,
        )
    )
    add_verify_flags(
        commands.add_parser(
            "verify",
            help="hold an output against its contracts",
            description="Reads all of an output, prints a line for each problem and changes nothing. Exit status: 0 if "
            "there is none, 1 if there are some, 2 if it is no output.",
            allow_abbrev=False,
        )
    )
    add_pack_flags(
        commands.add_parser(
            "pack",
            help="write the images of an output again as tars or tables",
            description="Writes the images of an output again, byte by byte, as tars or tables; goes on if begun.",
            allow_abbrev=False,
        )
    )
    add_report_flags(
        commands.add_parser(
            "report",
            help="make the page of an output again",
            description="Makes DIR/index.html again, also while a job still writes to DIR or after one has failed.",
            allow_abbrev=False,
        )
    )
    add_show_flags(
        commands.add_parser(
            "show",
            help="print the recipe in a picture",
            description="Prints what decides a picture, from the picture's own file, as JSON.",
            allow_abbrev=False,
        )
    )
    add_selftest_flags(
        commands.add_parser(
            "selftest",
            help="make one picture, to see whether this machine can",
            description="Makes one picture with the checkpoint in the package, and says which devices drew it.",
            allow_abbrev=False,
        )
    )
    known, others = parser.parse_known_args(arguments)
    if others and known.command != "generate":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    values = {name: value for name, value in vars(known).items() if name != "command"}
    _set_up_logging(known.verbose)
    quiet_libtpu()
    try:
        if known.command == "plan":
            print(plan(PlanOptions(**values)))
            return 0
        if known.command == "verify":
            return _verify(known.output)
        if known.command == "selftest":
            print(self_test(known.device, known.tpu))
            return 0
        if known.command == "pack":
            images = pack(known.source, known.output, known.format, known.samples_per_shard)
            print(f"{known.output}: {images:,} images")
            return 0
        if known.command == "report":
            print(page_of(known.output))
            return 0
        if known.command == "show":
            print(recipe_in(known.picture))
            return 0
        return generate(GenerateOptions(**values), beam_options(others, list(generating._option_string_actions)))
    except (UsageError, JobError, PackError) as error:
        if known.verbose:
            traceback.print_exc()
        print(f"lightmill: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("lightmill: interrupted; the same command goes on from the last finished shard", file=sys.stderr)
        return 130


def _verify(output: str) -> int:
    problems = 0
    for problems, problem in enumerate(verify(output), 1):  # noqa: B007  # the count is what is left
        print(problem)
    print(f"{output}: {problems:,} problems" if problems else f"{output}: whole")
    return 1 if problems else 0


def _set_up_logging(verbose: bool) -> None:
    clear = CLEAR if sys.stderr.isatty() else ""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format=f"{clear}%(name)s: %(message)s", force=True
    )
    log.setLevel(logging.INFO)
    if not verbose:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_means_something)


def _means_something(record: logging.LogRecord) -> bool:
    return not any(record.name == name and record.getMessage().startswith(begin) for name, begin in MEANINGLESS)


if __name__ == "__main__":
    sys.exit(main())
