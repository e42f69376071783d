"""`python -m notebook_launcher verify`: train the documented toy model on real ranks, and compare."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Run a command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m notebook_launcher", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="train the toy model on every combination; exit 1 if one differs")
    verify.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    verify.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="accumulation steps")
    options = parser.parse_args()
    from notebook_launcher.verification import verify_accumulation

    report = verify_accumulation(options.processes, options.steps)
    print(report)  # noqa: T201 - this is what the command is for
    return 0 if report.rows and report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
