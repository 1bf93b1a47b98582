"""Arguments that several `vesuvius volume` commands share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from vesuvius.commands.cli import Parser, natural, naturals, number_from_0, positive
from vesuvius.config import ArrayConfig, StoreConfig

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # argparse has no public name for it
_STORE = StoreConfig()


def add_source(parser: Parser, metavar: str, meaning: str) -> None:
    """Add the arguments that name a level of a volume."""
    parser.add_argument("path", metavar=metavar, help=meaning)
    parser.add_argument("--level", type=natural, default=0, help="level of the pyramid, 0 = finest (default: 0)")
    parser.add_argument(
        "--select", type=naturals, default=(), metavar="I,...", help="index for each axis other than z, y, x"
    )


def source_of(arguments: argparse.Namespace) -> ArrayConfig:
    """Return the level that the arguments name."""
    return ArrayConfig(path=arguments.path, level=arguments.level, select=arguments.select)


def add_store(parser: Parser) -> None:
    """Add the options for reading from stores."""
    parser.add_argument(
        "--requests",
        type=positive,
        default=_STORE.requests,
        help=f"requests in flight per process (default: {_STORE.requests})",
    )
    parser.add_argument(
        "--outage-minutes",
        type=number_from_0,
        default=_STORE.outage_minutes,
        metavar="M",
        help=f"how long to retry if the network or server is down (default: {_STORE.outage_minutes:g})",
    )
    parser.add_argument(
        "--forbidden-is-absent",
        action="store_true",
        help="treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing",
    )


def store_of(arguments: argparse.Namespace) -> StoreConfig:
    """Return the options for reading from stores."""
    return StoreConfig(
        requests=arguments.requests,
        outage_minutes=arguments.outage_minutes,
        forbidden_is_absent=arguments.forbidden_is_absent,
    )
