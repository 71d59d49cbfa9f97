"""The `hytrain` command: one module per subcommand.

A module's ``add`` adds arguments to a parser, and sets the default of ``run``: a function of the
parsed arguments that returns the exit status.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from hytrain.errors import HostMemoryError, HyTrainError, did_you_mean
from hytrain.tools.cli import bench, checkpoint, doctor, explain, export, plan, profile, trace
from hytrain.tools.cli.arguments import error_text
from hytrain.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit status: 2 if the arguments, or a file that they name, cannot be used.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("hytrain.run").setLevel(logging.INFO)  # progress of long work
    parser = _parser()
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser.print_help()
        return 2
    arguments = parser.parse_args(given)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; what is left must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # a shell's number for it
    except KeyboardInterrupt:
        print("hytrain: interrupted", file=sys.stderr)
        return 130  # a shell's number for it
    except OSError as error:
        # Of a file that a command names: the system's message says what is wrong.
        print(f"hytrain: {error_text(error)}", file=sys.stderr)
        return 2
    except HyTrainError as error:
        if not isinstance(error, (ValueError, HostMemoryError)):
            raise  # not for the user to fix
        print(f"hytrain: {error_text(error)}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """argparse's parser, which guesses what a misspelt command, choice or option means.

    A command, not `hytrain`, refuses its unknown options, before a value of one is taken for the
    name of a subcommand. An error is one line, without the usage. Options must be complete: the
    `--gpu-memory` of one command would be the `--gpu-memory-reserve` of another.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] of overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        known = self._option_string_actions
        found = (one.choices for one in self._actions if not one.option_strings and one.choices)
        commands = next(found, ())
        words = list(sys.argv[1:] if args is None else args)
        for given in words:
            name = given.partition("=")[0]
            if given in commands:
                break
            is_option = re.match("--?[a-z]", name) is not None
            if is_option and name not in known:
                self.error(_or_meant(f"unknown option {name}", name, known))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"(.*invalid choice: '(.*?)') \(choose from (.*)\)", message)
        if wrong and did_you_mean(wrong[2], known := re.findall(r"[\w-]+", wrong[3])):
            message = _or_meant(wrong[1], wrong[2], known)
        more = "" if message.endswith("?") else f" (`{self.prog} --help` lists all)"
        self.exit(2, f"{self.prog}: {message}{more}\n")


def _or_meant(message: str, name: str, known: Iterable[str]) -> str:
    """The message with the known name that is probably meant."""
    meant = did_you_mean(name, known).strip()
    return f"{message}: {meant}" if meant else message


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hytrain", description="Tools around training with hytrain.")
    parser.add_argument("--version", action="version", version=f"hytrain {__version__}")
    # DeepSpeed's launcher gives every script this argument.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # In the order of docs/cli.md: what is called first comes first.
    words = "explain what a configuration will do and what fits, or why a run has its k"
    explain.add(commands.add_parser("explain", help=words))
    words = "check in some seconds whether this machine is fit for offloaded training"
    doctor.add(commands.add_parser("doctor", help=words))
    words = "list checkpoints, verify that they are whole, or merge those of several hosts"
    checkpoint.add(commands.add_parser("checkpoint", help=words))
    words = "write a checkpoint's weights as safetensors, or as one file for torch.load"
    export.add(commands.add_parser("export", help=words))
    words = "report where the time of recorded steps goes, and what a change would save"
    trace.add(commands.add_parser("trace", help=words))
    words = "measure GPUs and hosts with a model, for `hytrain plan`"
    profile.add(commands.add_parser("profile", help=words))
    words = "divide a batch and the state over GPUs, or estimate a step"
    plan.add(commands.add_parser("plan", help=words))
    words = "measure the CPU optimizer, alone or beside DeepSpeed's and torch's"
    bench.add(commands.add_parser("bench", help=words))
    return parser
