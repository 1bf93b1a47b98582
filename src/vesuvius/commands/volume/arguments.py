"""Arguments that several `vesuvius volume` commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vesuvius.commands.cli import natural, naturals, number_from_0, positive
from vesuvius.config import ArrayConfig, StoreConfig

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name for it

_STORE = StoreConfig()


def add_source(parser: argparse.ArgumentParser, metavar: str, meaning: str) -> None:
    """Add what names a level of a volume."""
    parser.add_argument("path", metavar=metavar, help=meaning)
    parser.add_argument("--level", type=natural, default=0, help="level of the pyramid, 0 = finest (default: 0)")
    parser.add_argument(
        "--select",
        type=naturals,
        default=(),
        metavar="I,...",
        help="indices that fix the other axes than z, y, x",
    )


def source_of(arguments: argparse.Namespace) -> ArrayConfig:
    """The level that was named."""
    return ArrayConfig(path=arguments.path, level=arguments.level, select=arguments.select)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add how a store is asked."""
    parser.add_argument(
        "--requests",
        type=positive,
        default=_STORE.requests,
        help=f"at a time, of each process (default: {_STORE.requests})",
    )
    parser.add_argument(
        "--outage-minutes",
        type=number_from_0,
        default=_STORE.outage_minutes,
        metavar="M",
        help=f"how long to wait for a network or server that does not answer (default: {_STORE.outage_minutes:g})",
    )
    parser.add_argument(
        "--forbidden-is-absent",
        action="store_true",
        help="treat 403 as a missing chunk, as in S3 buckets that allow reads but no listing",
    )


def store_of(arguments: argparse.Namespace) -> StoreConfig:
    """How its store is asked."""
    return StoreConfig(
        requests=arguments.requests,
        outage_minutes=arguments.outage_minutes,
        forbidden_is_absent=arguments.forbidden_is_absent,
    )
